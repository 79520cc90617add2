"""Dropout settings by name."""

from __future__ import annotations

DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "embd_pdrop",
    "attention_dropout", "mlp_dropout", "embedding_dropout", "dropout_rate",
)  # fmt: skip
"""What the architectures call their dropouts."""
