"""Computes the reported numbers from sums."""

from __future__ import annotations

import math
from collections.abc import Mapping

LARGEST_EXPONENT = 700.0
"""The exponential of a larger number does not fit in a float."""


def summarise_totals(total: float, totals: Mapping[str, int], *, prefix: str = "") -> Mapping[str, float]:
    """Returns loss, perplexity and the counts of an evaluation.

    Args:
        total: the sum of all losses, in nats.
        totals: counts by name, among them `tokens`, and `bytes` (0 if unknown).
        prefix: put before the names `loss` and `perplexity`.

    Returns:
        `loss` (nats per token), `perplexity`, `bits_per_byte` (independent of the tokenizer; only if the bytes are
        known), and `totals` without unknown `bytes`.
    """
    tokens, size = totals["tokens"], totals.get("bytes", 0)
    counts = {name: count for name, count in totals.items() if count or name != "bytes"}
    if not tokens:
        return counts
    loss = total / tokens
    summary = {f"{prefix}loss": loss, f"{prefix}perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else math.inf}
    return summary | ({"bits_per_byte": total / math.log(2) / size} if size else {}) | counts
