"""Predictions of a finished model: words for masks, replaced tokens, text from an encoder-decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components.tokenizer import encode_texts
from terakoya.components.vocabulary import sentinel_ids
from terakoya.errors import UserError
from terakoya.inference.loading import (
    DISCRIMINATOR_CLASS,
    REPLACED_LABEL,
    find_device,
    find_model,
    load_model_and_tokenizer,
    move,
)
from terakoya.toolkit.formats.transformers_folder import longest_input

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MaskPrediction:
    """A word for a mask, and its probability."""

    word: str
    probability: float


@dataclass(frozen=True)
class TokenPrediction:
    """A token of the text, and the probability that it was replaced."""

    token: str
    probability: float

    @property
    def replaced(self) -> bool:
        """Whether the token was probably replaced."""
        return self.probability >= 0.5


def fill_mask(
    folder: Path | str, text: str, *, top: int = 5, device: str | None = None, trust_remote_code: bool = False
) -> list[list[MaskPrediction]]:
    """Returns the `top` most probable words for each [MASK] in `text`, best first. Raises UserError without a model or
    tokenizer, for code that may not run, without a mask in `text`, and for a text that is too long.

    Args:
        folder: an export, a checkpoint's `model/` (its tokenizer is in the folder next to it), or a checkpoint.
        device: by default the first GPU, or the CPU.
        trust_remote_code: whether to run Python code that the folder contains.
    """
    import torch
    from transformers import AutoModelForMaskedLM

    folder, _ = find_model(Path(folder), text)
    model, tokenizer, inputs = _load_with_inputs(AutoModelForMaskedLM, folder, text, device, trust=trust_remote_code)
    masks = [place for place, id in enumerate(inputs["input_ids"][0]) if id == tokenizer.mask_token_id]
    if not masks:
        raise UserError(f'"{text}": expected a {tokenizer.mask_token} to fill in, found none')
    with torch.no_grad():
        logits = model(**_on_device(inputs, model)).logits[0].cpu()[masks].float()
    best = logits.softmax(-1).topk(top)
    return [
        [
            MaskPrediction(word, probability)
            for word, probability in zip(tokenizer.convert_ids_to_tokens(ids), probabilities, strict=True)
        ]
        for ids, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def generate(
    folder: Path, text: str, *, max_new_tokens: int = 64, device: str | None = None, trust_remote_code: bool = False
) -> str:
    """Returns what the encoder-decoder in `folder` generates from `text` by greedy decoding. Raises UserError without a
    model or tokenizer, for code that may not run, and for a text that is too long.

    Each [MASK] of the text stands for a span that is cut out, as the model's sentinels do. The result contains special
    tokens: the sentinels, each before what stood there. `folder` and `device` are as for `fill_mask`.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM

    folder, _ = find_model(folder, text)
    model, tokenizer, inputs = _load_with_inputs(AutoModelForSeq2SeqLM, folder, text, device, trust=trust_remote_code)
    inputs.pop("token_type_ids", None)
    inputs["input_ids"] = [with_sentinels(inputs["input_ids"][0], tokenizer)]
    with torch.no_grad():
        generated = model.generate(**_on_device(inputs, model), max_new_tokens=max_new_tokens, do_sample=False)[0, 1:]
    return " ".join(tokenizer.convert_ids_to_tokens(generated))


def with_sentinels(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Returns `ids` with the sentinels of `tokenizer` in place of [MASK]s, in their order, as far as there are any."""
    sentinels = iter(sentinel_ids(tokenizer.get_vocab()))
    return [next(sentinels, id) if id == tokenizer.mask_token_id else id for id in ids]


def find_replaced(
    folder: Path | str, text: str, *, device: str | None = None, trust_remote_code: bool = False
) -> list[TokenPrediction]:
    """Returns every token of `text` with the probability that it was replaced, by the discriminator in `folder`; tokens
    that the tokenizer adds are left out. `folder` and `device` are as for `fill_mask`. Raises UserError without a
    discriminator or tokenizer, for code that may not run, and for a text that is too long."""
    import torch
    from transformers import AutoModelForPreTraining, AutoModelForTokenClassification

    folder, is_discriminator = find_model(Path(folder), text)
    if not is_discriminator:
        raise UserError(
            f"{folder}: expected a discriminator: {DISCRIMINATOR_CLASS}, or a token classifier with the label "
            f"{REPLACED_LABEL}"
        )
    classes = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("label2id") or {}
    auto = AutoModelForTokenClassification if REPLACED_LABEL in classes else AutoModelForPreTraining
    model, tokenizer, inputs = _load_with_inputs(auto, folder, text, device, trust=trust_remote_code)
    with torch.no_grad():
        logits = model(**_on_device(inputs, model)).logits[0].float()
    labels = model.config.label2id
    replaced = logits.softmax(-1)[:, labels[REPLACED_LABEL]] if REPLACED_LABEL in labels else logits.sigmoid()
    ids, probabilities = inputs["input_ids"][0], replaced.tolist()
    # computed from the text: computed from ids alone, the mask would also mark unknown words
    added = tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]
    tokens = zip(tokenizer.convert_ids_to_tokens(ids), probabilities, added, strict=True)
    return [TokenPrediction(token, probability) for token, probability, special in tokens if not special]


def _load_with_inputs(auto: Any, folder: Path, text: str, device: str | None, *, trust: bool) -> tuple[Any, Any, Any]:
    """Returns the model on its device, the tokenizer, and `text` as the model's inputs: lists of one list. `trust`
    allows running code in `folder`."""
    chosen = find_device(device)
    model, tokenizer = load_model_and_tokenizer(auto, folder, trust=trust)
    inputs = dict(encode_texts(lambda texts: tokenizer(texts), [text]))
    length, limit = len(inputs["input_ids"][0]), longest_input(model)
    if limit is not None and length > limit:
        raise UserError(f"the text has {length} tokens; the model in {folder} takes at most {limit}")
    return move(model, chosen), tokenizer, inputs


def _on_device(inputs: Mapping[str, list[list[int]]], model: Any) -> dict[str, Tensor]:
    """Returns `inputs` as tensors (1, T) where `model` is."""
    import torch

    return {name: torch.tensor(ids, device=model.device) for name, ids in inputs.items()}
