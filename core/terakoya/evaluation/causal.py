"""Perplexity of causal models over whole documents, in overlapping windows where they are too long for the model.

As in Transformers' guide "Perplexity of fixed-length models": a window begins `stride` tokens after the one before, and
of each window those tokens are scored that no window before it has held. So a token has at least `length - stride`
tokens before it, unless its document has fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from terakoya.evaluation.batches import Scored, batched, negative_log_likelihood
from terakoya.evaluation.data import Text
from terakoya.evaluation.numbers import from_totals


def windows(ids: np.ndarray, *, length: int, stride: int) -> Iterator[Scored]:
    """The windows over `ids` (n,), in which every token but the first is scored once; `stride` < `length`."""
    assert 0 < stride < length
    seen = 1
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + length, len(ids))
        targets = np.arange(seen, end)
        yield Scored(ids[begin:end], targets - 1 - begin, ids[targets])
        seen = end
        if end == len(ids):
            return


def evaluate(
    model: torch.nn.Module,
    texts: Iterable[Text],
    *,
    start: int | None,
    pad: int,
    length: int,
    stride: int,
    batch_tokens: int,
    device: torch.device,
) -> Mapping[str, float]:
    """Loss and perplexity of `model` over `texts`, each by itself.

    Args:
        start: the id that is put before each text, seen and not scored; None: the first token is not scored.
        length, stride: of windows, in tokens.
        batch_tokens: at most so many positions at once, padding counted.

    Returns `loss` (nats a token), `perplexity`, `tokens` scored, `documents`, and of texts whose bytes are known
    `bits_per_byte` and `bytes`.
    """
    totals = {"documents": 0, "tokens": 0, "bytes": 0}

    def cut() -> Iterator[Scored]:
        for text in texts:
            ids = text.ids if start is None else np.concatenate([[start], text.ids])
            if len(ids) < 2:
                continue
            totals["documents"] += 1
            totals["tokens"] += len(ids) - 1
            totals["bytes"] += text.bytes or 0
            yield from windows(ids, length=length, stride=stride)

    lost = 0.0
    for batch in batched(cut(), tokens=batch_tokens):
        lost += negative_log_likelihood(model, batch, pad=pad, device=device, use_cache=False)
    return from_totals(lost, totals)
