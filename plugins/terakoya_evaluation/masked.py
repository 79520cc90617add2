"""Pseudo-perplexity of masked models (Salazar et al., 2020, arXiv:1910.14659): tokens are masked one at a time.

The pseudo-log-likelihood of a line is the sum over its tokens of log p(token | all others); the pseudo-perplexity of a
text is exp(-sum over its lines / tokens in them). A line of n tokens gives n sequences of n + 2 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from terakoya.errors import UserError
from terakoya_evaluation.batches import ScoredSequence, batch_by_length, negative_log_likelihood
from terakoya_evaluation.data import DataSet, Text
from terakoya_evaluation.models import EvaluatedModel
from terakoya_evaluation.numbers import summarise_totals
from terakoya_evaluation.options import EvaluateOptions
from terakoya_evaluation.result import Numbers

LINES = 100
"""Default number of lines of each data set."""


@dataclass(frozen=True)
class Frame:
    """The ids of the tokens `before` and `after` each line, and of [MASK]."""

    before: int
    after: int
    mask: int


def measure(
    model: EvaluatedModel, data: Sequence[DataSet], options: EvaluateOptions
) -> tuple[Mapping[str, Numbers], Mapping[str, Any]]:
    """Returns what `evaluate` finds on each of `data`, and the settings that decide it. Raises UserError for options
    that do not fit, and for a tokenizer without the tokens of a `Frame`."""
    if options.stride is not None:
        raise UserError("--stride: is for causal models; for masked models, lines are cut at --length")
    ids = {
        "before": model.special_token_id("cls", "bos"),
        "after": model.special_token_id("sep", "eos"),
        "mask": model.special_token_id("mask"),
    }
    missing = [name for name, number in ids.items() if number is None]
    if missing:
        raise UserError(
            f"{model.folder}: its tokenizer has no token for {', '.join(missing)}: expected [CLS] or BOS before a "
            "line, [SEP] or EOS after it, and [MASK]"
        )
    frame = Frame(**{name: int(number or 0) for name, number in ids.items()})
    window = model.window(options.length)
    if window < 3:
        raise UserError(f"--length {window}: expected at least 3, a token between two special ones")
    limit = LINES if options.limit is None else options.limit
    results = {
        data_set.name: evaluate(
            model.model, data_set.texts("line", limit), frame=frame, pad=model.special_token_id("pad") or 0,
            length=window, batch_tokens=options.batch_tokens,
        )
        for data_set in data
    }  # fmt: skip
    return results, {"length": window, "limit": limit}


def masked_copies(ids: np.ndarray, frame: Frame) -> Iterator[ScoredSequence]:
    """Yields, for each token of `ids` (n,), these ids in their frame with that token masked."""
    framed = np.concatenate([[frame.before], ids, [frame.after]])
    for position in range(1, len(framed) - 1):
        masked = framed.copy()
        masked[position] = frame.mask
        yield ScoredSequence(masked, np.array([position]), framed[[position]])


def evaluate(
    model: PreTrainedModel, lines: Iterable[Text], *, frame: Frame, pad: int, length: int, batch_tokens: int
) -> Numbers:
    """Returns pseudo-loss and pseudo-perplexity of `model` over `lines`; each line is scored separately.

    A line that does not fit in `length` tokens is cut into pieces, which are scored separately.

    Args:
        frame: the ids around each line.
        pad: the id of padding.
        batch_tokens: largest number of positions in a batch, with padding.

    Returns:
        `pseudo_loss` (nats per token), `pseudo_perplexity`, `tokens`, `lines`, `pieces` if lines were cut, and for
        texts of known size `bits_per_character`, `bits_per_byte`, `characters` and `bytes`.
    """
    totals = {"lines": 0, "tokens": 0, "characters": 0, "bytes": 0}
    pieces = 0
    piece_length = length - 2

    def all_copies() -> Iterator[ScoredSequence]:
        nonlocal pieces
        for line in lines:
            if not len(line.ids):
                continue
            totals["lines"] += 1
            totals["tokens"] += len(line.ids)
            totals["characters"] += line.characters
            totals["bytes"] += line.bytes
            for begin in range(0, len(line.ids), piece_length):
                pieces += 1
                yield from masked_copies(line.ids[begin : begin + piece_length], frame)

    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for batch in batch_by_length(all_copies(), tokens=batch_tokens):
        total += negative_log_likelihood(model, batch, pad=pad, device=model.device)
    piece_count = {"pieces": pieces} if pieces > totals["lines"] else {}
    return {**summarise_totals(float(total), totals, prefix="pseudo_"), **piece_count}
