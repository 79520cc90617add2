"""Computes the reported numbers from sums."""

from __future__ import annotations

import math
from collections.abc import Mapping

UNITS = {"characters": "character", "bytes": "byte"}
"""Counts of text -> what one of them is called."""
LARGEST_EXPONENT = 700.0
"""The exponential of a larger number does not fit in a float."""


def summarise_totals(total: float, totals: Mapping[str, int], *, prefix: str = "") -> Mapping[str, float]:
    """Returns loss, perplexity and the counts of an evaluation.

    Args:
        total: the sum of all losses, in nats.
        totals: counts by name, among them `tokens`, `characters` and `bytes` (0 if unknown).
        prefix: put before the names `loss` and `perplexity`.

    Returns:
        `loss` (nats per token), `perplexity`, where the text's size is known `bits_per_character` and `bits_per_byte`
        (independent of the tokenizer), and `totals` without what is unknown.
    """
    tokens = totals["tokens"]
    counts = {name: count for name, count in totals.items() if count or name not in UNITS}
    if not tokens:
        return counts
    loss = total / tokens
    summary = {f"{prefix}loss": loss, f"{prefix}perplexity": math.exp(loss) if loss < LARGEST_EXPONENT else math.inf}
    bits = {f"bits_per_{unit}": total / math.log(2) / totals[each] for each, unit in UNITS.items() if totals[each]}
    return summary | bits | counts
