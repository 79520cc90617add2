"""Pseudo-perplexity of masked models (Salazar et al., 2020, arXiv:1910.14659): each token masked in its turn.

The pseudo-log-likelihood of a line is the sum over its tokens of log p(token | all others); the pseudo-perplexity of a
text is exp(-sum over its lines / tokens in them). A line of n tokens is n sequences of n + 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from terakoya.evaluation.batches import Scored, batched, negative_log_likelihood
from terakoya.evaluation.data import Text
from terakoya.evaluation.numbers import from_totals


def copies(ids: np.ndarray, *, before: int, after: int, mask: int) -> Iterator[Scored]:
    """For each token of `ids` (n,) the whole between the ids `before` and `after` with that token masked."""
    framed = np.concatenate([[before], ids, [after]])
    for place in range(1, len(framed) - 1):
        hidden = framed.copy()
        hidden[place] = mask
        yield Scored(hidden, np.array([place]), framed[[place]])


def evaluate(
    model: torch.nn.Module,
    lines: Iterable[Text],
    *,
    before: int,
    after: int,
    mask: int,
    pad: int,
    length: int,
    batch_tokens: int,
    device: torch.device,
) -> Mapping[str, float]:
    """Pseudo-loss and pseudo-perplexity of `model` over `lines`, each by itself; one of more tokens than fit a row of
    `length` is cut into pieces, each by itself.

    Returns `pseudo_loss` (nats a token), `pseudo_perplexity`, `tokens`, `lines`, `pieces` where lines were cut, and of
    texts whose bytes are known `bits_per_byte` and `bytes`.
    """
    totals = {"lines": 0, "tokens": 0, "bytes": 0}
    pieces = 0
    room = length - 2

    def cut() -> Iterator[Scored]:
        nonlocal pieces
        for line in lines:
            if not len(line.ids):
                continue
            totals["lines"] += 1
            totals["tokens"] += len(line.ids)
            totals["bytes"] += line.bytes or 0
            for begin in range(0, len(line.ids), room):
                pieces += 1
                yield from copies(line.ids[begin : begin + room], before=before, after=after, mask=mask)

    lost = 0.0
    for batch in batched(cut(), tokens=batch_tokens):
        lost += negative_log_likelihood(model, batch, pad=pad, device=device)
    cut_up = {"pieces": pieces} if pieces > totals["lines"] else {}
    return {**from_totals(lost, totals, prefix="pseudo_"), **cut_up}
