"""What a finished model says: words for masks, replaced tokens, continuations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya.inference.loading import DISCRIMINATOR, REPLACED, find_model, load, longest

if TYPE_CHECKING:
    pass


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
    model, tokenizer = load(auto, folder, trust=trust)
    inputs = tokenizer(text, return_tensors="pt")
    length, most = inputs["input_ids"].shape[1], longest(model)
    if most is not None and length > most:
        raise UserError(f"the text has {length} tokens; the model in {folder} takes at most {most}")
    return model, tokenizer, inputs
