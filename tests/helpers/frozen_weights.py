"""Which weights `frozen_layers` 1 freezes."""

from __future__ import annotations

LOWEST = ("embeddings", "encoder.layer.0.")


def is_low(name: str) -> bool:
    """Whether a weight of BERT's or ELECTRA's is an embedding or of the lowest layer."""
    return any(part in name for part in LOWEST) or "decoder.weight" in name
