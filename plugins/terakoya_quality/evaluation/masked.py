"""Pseudo-perplexity of masked models (Salazar et al., 2020, arXiv:1910.14659): tokens are masked one at a time.

The pseudo-log-likelihood of a line is the sum over its tokens of log p(token | all others); the pseudo-perplexity of a
text is exp(-sum over its lines / tokens in them). A line of n tokens gives n sequences of n + 2 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from terakoya_quality.evaluation.batches import ScoredSequence, batch_by_length, negative_log_likelihood
from terakoya_quality.evaluation.data import Text
from terakoya_quality.evaluation.numbers import summarise_totals


def masked_copies(ids: np.ndarray, *, before: int, after: int, mask: int) -> Iterator[ScoredSequence]:
    """Yields, for each token of `ids` (n,), the sequence `before`, `ids`, `after` with that token masked."""
    framed = np.concatenate([[before], ids, [after]])
    for position in range(1, len(framed) - 1):
        masked = framed.copy()
        masked[position] = mask
        yield ScoredSequence(masked, np.array([position]), framed[[position]])


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
    """Returns pseudo-loss and pseudo-perplexity of `model` over `lines`; each line is scored separately.

    A line that does not fit in `length` tokens is cut into pieces, which are scored separately.

    Args:
        before, after, mask, pad: ids of the tokens before and after each line, of [MASK] and of padding.
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
                yield from masked_copies(line.ids[begin : begin + piece_length], before=before, after=after, mask=mask)

    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batch_by_length(all_copies(), tokens=batch_tokens):
        total += negative_log_likelihood(model, batch, pad=pad, device=device)
    piece_count = {"pieces": pieces} if pieces > totals["lines"] else {}
    return {**summarise_totals(float(total), totals, prefix="pseudo_"), **piece_count}
