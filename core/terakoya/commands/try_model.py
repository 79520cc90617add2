"""`terakoya try`: the top words for each [MASK] of a sentence, or the tokens a discriminator believes replaced."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

MASK = "[MASK]"
DISCRIMINATOR = "ElectraForPreTraining"
"""Transformers' class that says of each token whether it was replaced."""
REPLACED = "replaced"
"""The label that makes a token classifier a discriminator."""


@dataclass(frozen=True)
class Guess:
    """A word for a mask, and its probability."""

    word: str
    probability: float


@dataclass(frozen=True)
class Judged:
    """A token of the text, and the probability that it was replaced."""

    token: str
    probability: float

    @property
    def replaced(self) -> bool:
        """Whether that is likelier than not."""
        return self.probability >= 0.5


def find_model(folder: Path, text: str) -> tuple[Path, bool]:
    """The Transformers folder that `folder` means, and whether its model is a discriminator.

    `folder` is that folder itself, a checkpoint, or what holds `generator/` and `discriminator/`: the first for a
    `text` with a [MASK], the second for any other.

    Raises:
        UserError: there is no model.
    """
    if (folder / "manifest.json").is_file():
        folder = folder / "model"
    if not (folder / "config.json").is_file():
        part = folder / ("generator" if MASK in text else "discriminator")
        if not (part / "config.json").is_file():
            raise UserError(
                f"{folder}: expected a Transformers folder, found no config.json; `terakoya export` writes one"
            )
        folder = part
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classes = config.get("architectures") or ()
    return folder, DISCRIMINATOR in classes or REPLACED in (config.get("label2id") or {})


def own_code(folder: Path) -> list[str]:
    """The files with the model's own code that Transformers would run to load the one in `folder`; none where it knows
    the model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") in CONFIG_MAPPING_NAMES:
        return []
    named = (config.get("auto_map") or {}).values()
    classes = [each for value in named for each in (value if isinstance(value, list) else [value]) if each]
    return sorted({f"{each.rpartition('.')[0]}.py" for each in classes})


def fill_mask(folder: Path, text: str, *, top: int = 5, trust_remote_code: bool = False) -> list[list[Guess]]:
    """The `top` guesses for each [MASK] in `text`, best first, by the model in `folder`.

    `folder` is an export, a checkpoint's `model/` (its tokenizer lies beside it) or the checkpoint itself. Code that a
    model of its own kind brings along is run if `trust_remote_code`.

    Raises:
        UserError: no model or tokenizer there, code that is not to be run, no mask in `text`, or too long a text.
    """
    import torch
    from transformers import AutoModelForMaskedLM

    folder, _ = find_model(folder, text)
    model, tokenizer, inputs = _load(AutoModelForMaskedLM, folder, text, trust=trust_remote_code)
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


def write_on(folder: Path, text: str, *, most: int = 64, trust_remote_code: bool = False) -> str:
    """What the encoder-decoder in `folder` (as for `fill_mask`) writes of `text`, at most `most` tokens, the likeliest
    each time; special tokens, such as those that stand for spans, included.

    Raises:
        UserError: no model or tokenizer there, code that is not to be run, or too long a text.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM

    folder, _ = find_model(folder, text)
    model, tokenizer, inputs = _load(AutoModelForSeq2SeqLM, folder, text, trust=trust_remote_code)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        written = model.generate(**inputs, max_new_tokens=most, do_sample=False)[0, 1:]
    return " ".join(tokenizer.convert_ids_to_tokens(written))


def find_replaced(folder: Path, text: str, *, trust_remote_code: bool = False) -> list[Judged]:
    """Every token of `text` with the probability that it was replaced, by the discriminator in `folder` (as for
    `fill_mask`). Tokens that the tokenizer adds are left out.

    Raises:
        UserError: no discriminator or tokenizer there, code that is not to be run, or too long a text.
    """
    import torch
    from transformers import AutoModelForPreTraining, AutoModelForTokenClassification

    folder, is_discriminator = find_model(folder, text)
    if not is_discriminator:
        raise UserError(
            f"{folder}: expected a discriminator: {DISCRIMINATOR}, or a token classifier with the label {REPLACED}"
        )
    classes = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("label2id") or {}
    auto = AutoModelForTokenClassification if REPLACED in classes else AutoModelForPreTraining
    model, tokenizer, inputs = _load(auto, folder, text, trust=trust_remote_code)
    with torch.no_grad():
        logits = model(**inputs).logits[0].float()
    labels = model.config.label2id
    replaced = logits.softmax(-1)[:, labels[REPLACED]] if REPLACED in labels else logits.sigmoid()
    probabilities = replaced.tolist()
    ids = inputs["input_ids"][0].tolist()
    # asked for with the text: of ids alone, an unknown word would count as added, too
    added = tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]
    tokens = zip(tokenizer.convert_ids_to_tokens(ids), probabilities, added, strict=True)
    return [Judged(token, probability) for token, probability, special in tokens if not special]


def _load(auto: Any, folder: Path, text: str, *, trust: bool) -> tuple[Any, Any, Any]:
    """Model and tokenizer of `folder`, and `text` as the model takes it. Code in it is run only with `trust`."""
    from transformers import AutoTokenizer

    from terakoya import model_folder

    code = own_code(folder)
    if code and not trust:
        raise UserError(
            f"{folder}: Transformers does not have this model; it brings its own code, {', '.join(code)}. Read that "
            "and, if it may run on this machine, say so: --trust-remote-code (in Python: trust_remote_code=True)"
        )
    model_folder.quieten()
    places = [folder, folder.parent / "tokenizer", folder.parent.parent / "tokenizer"]
    home = next((place for place in places if (place / "tokenizer_config.json").is_file()), folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(home, local_files_only=True, trust_remote_code=trust)
        model = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=trust).eval()
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{folder}: cannot be loaded: {error}") from error
    inputs = tokenizer(text, return_tensors="pt")
    length, longest = inputs["input_ids"].shape[1], getattr(model.config, "max_position_embeddings", None)
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if longest is not None and table is not None and table.padding_idx is not None:
        longest -= table.padding_idx + 1  # RoBERTa's positions begin behind the padding id
    if longest is not None and length > longest:
        raise UserError(f"the text has {length} tokens; the model in {folder} takes at most {longest}")
    return model, tokenizer, inputs


def command(
    folder: Annotated[Path, typer.Argument(help="An exported model, or a checkpoint.", metavar="DIR")],
    text: Annotated[str, typer.Argument(help='For example "東京は日本の[MASK]です。"')],
    top: Annotated[int, typer.Option(min=1, help="How many words for each mask.")] = 5,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model of its own kind brings.")
    ] = False,
) -> None:
    """Fill in the [MASK]s of a sentence; with a discriminator, mark the tokens it believes replaced; with an
    encoder-decoder, write what it makes of the text."""
    from rich.console import Console

    console = Console(highlight=False)
    model, is_discriminator = find_model(folder, text)
    if is_discriminator:
        show(find_replaced(folder, text, trust_remote_code=trust_remote_code), console)
        return
    if json.loads((model / "config.json").read_text(encoding="utf-8")).get("is_encoder_decoder"):
        console.print(write_on(folder, text, trust_remote_code=trust_remote_code), markup=False)
        return
    for number, guesses in enumerate(fill_mask(folder, text, top=top, trust_remote_code=trust_remote_code), 1):
        console.print(f"[MASK] {number}", markup=False)
        for guess in guesses:
            console.print(f"  {guess.probability:6.3f}  {guess.word}", markup=False)


def show(tokens: list[Judged], console: Console) -> None:
    """Prints the text with replaced tokens in red, or between marks where there is no colour, and their probabilities;
    if there are none, the likeliest."""
    from rich.text import Text

    marks = not console.is_terminal or console.no_color
    line = Text()
    for number, each in enumerate(tokens):
        shown = f"«{each.token}»" if each.replaced and marks else each.token
        line.append(" " if number else "").append(shown, style="bold red" if each.replaced else "")
    console.print(line, soft_wrap=True)
    found = [each for each in tokens if each.replaced]
    if not found:
        console.print("no token is believed replaced; the likeliest:")
    for each in found or sorted(tokens, key=lambda each: -each.probability)[:1]:
        console.print(f"  {each.probability:6.3f}  {each.token}", markup=False)
