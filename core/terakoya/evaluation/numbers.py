"""From sums to the numbers that are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping

LARGEST = 700.0
"""Above it an exponential is no float any more."""


def from_totals(lost: float, totals: Mapping[str, int], *, prefix: str = "") -> Mapping[str, float]:
    """`loss`, nats a token, and `perplexity`, their names after `prefix`, of `lost` nats in all; then `totals` without
    `bytes` of none, and where there are bytes `bits_per_byte`, which does not depend on the tokenizer."""
    tokens, size = totals["tokens"], totals.get("bytes", 0)
    counted = {name: count for name, count in totals.items() if count or name != "bytes"}
    if not tokens:
        return counted
    loss = lost / tokens
    found = {f"{prefix}loss": loss, f"{prefix}perplexity": math.exp(loss) if loss < LARGEST else math.inf}
    return found | ({"bits_per_byte": lost / math.log(2) / size} if size else {}) | counted
