"""A decoder of given sizes as the formulas see it, for runs whose code is not at hand: those that others published."""

from __future__ import annotations

from terakoya_clusters.layouts.cluster import Recomputation
from terakoya_clusters.layouts.transformer import Activations, Shares, Transformer

DIVIDED = 24 / 34
"""Fraction of a layer's activations that tensor-parallel devices divide, without those of norms, dropout and residuals
(Korthikanti et al., 2022, arXiv:2205.05198, section 4)."""
LOGITS_KEPT = 14.0
"""Bytes of a logit that exist at once: as bfloat16 and float32, its logarithm, and both gradients."""


def decoder(
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    vocabulary_size: int,
    sequence_length: int,
    feed_forward: int | None = None,
    key_value_heads: int | None = None,
    gated: bool = False,
    tied: bool = True,
    positions: bool = True,
    flash: bool = True,
) -> Transformer:
    """Returns a GPT of these sizes, or with `gated` a Llama, with 16-bit activations as Korthikanti et al. (2022,
    arXiv:2205.05198, section 4) count them.

    Args:
        feed_forward: None is four times the hidden size.
        positions: whether positions have learnt embeddings.
        flash: whether attention keeps no scores.
    """
    width = feed_forward or 4 * hidden_size
    keys = (key_value_heads or heads) * (hidden_size // heads)
    fused = [(hidden_size, hidden_size + 2 * keys), (hidden_size, hidden_size)]
    wide = [(hidden_size, width)] * (2 if gated else 1) + [(width, hidden_size)]
    kept = korthikanti(hidden_size, heads, sequence_length, flash=flash)
    if gated:  # no dropout masks; the gate, its activation, the other half and their product are kept
        kept[None] = 2.0 * (6 * hidden_size + 3 * keys + 4 * width)
        # the layer's input, the output of attention, and the outputs of every second product
        kept["selective"] = 2.0 * (2 * hidden_size + (3 * hidden_size + 2 * keys + 2 * width) / 2)
    tensor_shares, position_shares = korthikanti_shares(kept)
    return Transformer(
        layers=layers, hidden_size=hidden_size, feed_forward=width, heads=heads,
        key_value_heads=key_value_heads or heads, vocabulary_size=vocabulary_size, sequence_length=sequence_length,
        attention_width=hidden_size, gated=gated, products=tuple(fused + wide), other_weights=2 * hidden_size,
        embedding_weights=(vocabulary_size + (sequence_length if positions else 0)) * hidden_size,
        head_weights=0 if tied else vocabulary_size * hidden_size,
        context=sequence_length / 2, activations=kept, tensor_shares=tensor_shares, position_shares=position_shares,
        head_activations=4.0 * hidden_size + LOGITS_KEPT * vocabulary_size,
    )  # fmt: skip


def korthikanti(
    hidden_size: int, heads: int, sequence_length: int, *, flash: bool
) -> dict[Recomputation | None, float]:
    """Bytes of a token's 16-bit activations with dropout in one layer: h (34 + 5 a s / h); without the scores if
    attention keeps none or recomputes them; 2 h if everything is recomputed."""
    scores = 5.0 * heads * sequence_length / hidden_size
    whole = 34.0 * hidden_size
    return {None: whole if flash else whole + scores * hidden_size, "selective": whole, "full": 2.0 * hidden_size}


def korthikanti_shares(activations: Activations) -> tuple[Shares, Shares]:
    """The `tensor_shares` and `position_shares` of `activations`: sequence parallelism divides all of them; without it
    a layer's input, which is all that full recomputation keeps, is whole."""
    divided = {each: 0.0 if each == "full" else DIVIDED * size for each, size in activations.items()}
    return (
        {each: (size - divided[each], divided[each]) for each, size in activations.items()},
        {each: (0.0, size) for each, size in activations.items()},
    )
