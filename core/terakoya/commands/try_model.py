"""`terakoya try`: the top words for each [MASK] of a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terakoya.errors import UserError


@dataclass(frozen=True)
class Guess:
    """A word for a mask, and its probability."""

    word: str
    probability: float


def fill_mask(folder: Path, text: str, *, top: int = 5) -> list[list[Guess]]:
    """The `top` guesses for each [MASK] in `text`, best first, by the model in `folder`.

    `folder` is an export, a checkpoint's `model/` (its tokenizer lies beside it) or the checkpoint itself.

    Raises:
        UserError: no model or tokenizer there, or no mask in `text`.
    """
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer
    from transformers.utils import logging

    if (folder / "manifest.json").is_file():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: expected a Transformers folder, found no config.json")
    beside = folder.parent / "tokenizer"
    home = folder if (folder / "tokenizer_config.json").is_file() or not beside.is_dir() else beside
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(home, local_files_only=True)
    model = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True).eval()
    inputs = tokenizer(text, return_tensors="pt")
    masks = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
    if not len(masks):
        raise UserError(f'"{text}": expected a {tokenizer.mask_token} to fill in, found none')
    with torch.no_grad():
        logits = model(**inputs).logits[0, masks].float()
    best = logits.softmax(-1).topk(top)
    return [
        [Guess(word, probability) for word, probability in zip(tokenizer.convert_ids_to_tokens(ids), row, strict=True)]
        for ids, row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def command(
    folder: Annotated[Path, typer.Argument(help="An exported model, or a checkpoint.", metavar="DIR")],
    text: Annotated[str, typer.Argument(help='For example "東京は日本の[MASK]です。"')],
    top: Annotated[int, typer.Option(min=1, help="How many words for each mask.")] = 5,
) -> None:
    """Fill in the [MASK]s of a sentence with a trained model."""
    from rich.console import Console

    console = Console(highlight=False)
    for number, guesses in enumerate(fill_mask(folder, text, top=top), 1):
        console.print(f"[MASK] {number}", markup=False)
        for guess in guesses:
            console.print(f"  {guess.probability:6.3f}  {guess.word}", markup=False)
