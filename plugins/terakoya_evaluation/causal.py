"""Perplexity of causal models over whole documents; documents too long for the model are read in overlapping windows.

As in Transformers' guide "Perplexity of fixed-length models", each window begins `stride` tokens after the previous
one, and only tokens that no earlier window contained are scored. So a token is predicted from at least
`length - stride` earlier tokens, or from all earlier tokens of its document if there are fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def measure(
    model: EvaluatedModel, data: Sequence[DataSet], options: EvaluateOptions
) -> tuple[Mapping[str, Numbers], Mapping[str, Any]]:
    """Returns what `evaluate` finds on each of `data`, and the settings that decide it. Raises UserError for a length
    or a stride that does not fit."""
    window = model.window(options.length)
    step = max(1, window // 2) if options.stride is None else options.stride
    if not 0 < step < window:
        raise UserError(f"--stride {step}: expected 1 to {window - 1}: windows of {window} must overlap by a token")
    start = model.special_token_id("bos", "eos") if options.start_token else None
    results = {
        data_set.name: evaluate(
            model.model, data_set.texts("document", options.limit), start=start, pad=model.special_token_id("pad") or 0,
            length=window, stride=step, batch_tokens=options.batch_tokens,
        )
        for data_set in data
    }  # fmt: skip
    token = None if start is None else model.tokenizer.convert_ids_to_tokens(start)
    return results, {"length": window, "stride": step, "start_token": token, "limit": options.limit}


def windows(ids: np.ndarray, *, length: int, stride: int) -> Iterator[ScoredSequence]:
    """Yields windows over `ids` (n,) in which every token but the first is scored once; `stride` < `length`."""
    assert 0 < stride < length
    seen = 1
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + length, len(ids))
        targets = np.arange(seen, end)
        yield ScoredSequence(ids[begin:end], targets - 1 - begin, ids[targets])
        seen = end
        if end == len(ids):
            return


def evaluate(
    model: PreTrainedModel,
    texts: Iterable[Text],
    *,
    start: int | None,
    pad: int,
    length: int,
    stride: int,
    batch_tokens: int,
) -> Numbers:
    """Returns loss and perplexity of `model` over `texts`; each text is scored separately.

    Args:
        start: id of a token that is put before each text and is not scored; None: the text's first token is not scored.
        length, stride: of the windows, in tokens.
        batch_tokens: largest number of positions in a batch, with padding.

    Returns:
        `loss` (nats per token), `perplexity`, `tokens` (scored), `documents`, and for texts of known size
        `bits_per_character`, `bits_per_byte`, `characters` and `bytes`.
    """
    totals = {"documents": 0, "tokens": 0, "characters": 0, "bytes": 0}

    def all_windows() -> Iterator[ScoredSequence]:
        for text in texts:
            ids = text.ids if start is None else np.concatenate([[start], text.ids])
            if len(ids) < 2:
                continue
            totals["documents"] += 1
            totals["tokens"] += len(ids) - 1
            totals["characters"] += text.characters
            totals["bytes"] += text.bytes
            yield from windows(ids, length=length, stride=stride)

    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for batch in batch_by_length(all_windows(), tokens=batch_tokens):
        total += negative_log_likelihood(model, batch, pad=pad, device=model.device, use_cache=False)
    return summarise_totals(float(total), totals)
