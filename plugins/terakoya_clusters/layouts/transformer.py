"""A Transformer as the formulas see it: its matrix products, its memory traffic, and what its backward needs.

Letters: h hidden size, f feed-forward size, a heads, s positions of a row, V vocabulary. Numbers are for one token in
one layer unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terakoya_clusters.layouts.cluster import Recomputation

Activations = Mapping[Recomputation | None, float]
"""Recomputation -> bytes kept until the backward."""
Shares = Mapping[Recomputation | None, tuple[float, float]]
"""Recomputation -> bytes that each tensor-parallel device keeps, and bytes that they divide."""

LAYER_TRAFFIC = 36
"""Bytes per channel that the forward's pointwise operations read and write: two norms, rotary positions, residuals."""
PLAIN_TRAFFIC, GATED_TRAFFIC = 4, 10
"""The same for a channel of the feed-forward part, without and with a gate."""
SCORES_TRAFFIC = 11
"""The same for a score, where attention keeps them: written, softmax, dropout and its mask, read again."""
LOGITS_TRAFFIC = 30
"""Bytes read and written for a logit, forward and backward: as bfloat16 and float32, exponential, gradient."""
DIVIDED = 24 / 34
"""Fraction of a layer's activations that tensor-parallel devices divide, without those of norms, dropout and residuals
(Korthikanti et al., 2022, arXiv:2205.05198, section 4)."""
LOGITS_KEPT = 14.0
"""Bytes of a logit that exist at once: as bfloat16 and float32, its logarithm, and both gradients."""


@dataclass(frozen=True)
class Transformer:
    """A model of equal layers.

    Attributes:
        layers, hidden_size, feed_forward, heads, key_value_heads, vocabulary_size, sequence_length: its sizes.
        attention_width: heads x the size of one head.
        gated: whether the feed-forward part has a gate.
        products: (inputs, outputs) of each matrix of a layer.
        other_weights: weights of a layer outside of matrices.
        embedding_weights, head_weights: before the first layer and after the last; a head that is tied to the
            embeddings has none.
        context: average number of positions that a position attends to.
        activations: recomputation -> bytes that one device keeps until the backward.
        tensor_shares, position_shares: the same of tensor-parallel devices, without and with sequence parallelism,
            which also divides what norms, dropout and residuals keep.
        weight_copies: bytes that a step keeps for each weight in addition to the weight, as autocast does.
        head_activations: bytes of a token kept outside of layers: logits, loss.
        head_share: operations outside of layers, as a fraction of those of a vocabulary head at every position: less
            than 1 where only some positions have logits, more where a second, smaller model is trained.
        backward: bytes of a token that a layer's backward holds in addition to what was kept.
        causal: whether a position attends to none after it.
    """

    layers: int
    hidden_size: int
    feed_forward: int
    heads: int
    key_value_heads: int
    vocabulary_size: int
    sequence_length: int
    attention_width: int
    gated: bool
    products: tuple[tuple[int, int], ...]
    other_weights: int
    embedding_weights: int
    head_weights: int
    context: float
    activations: Activations
    head_activations: float
    tensor_shares: Shares
    position_shares: Shares
    weight_copies: float = 0.0
    backward: float = 0.0
    head_share: float = 1.0
    causal: bool = True

    @property
    def layer_weights(self) -> int:
        """Elements of a layer."""
        return sum(inputs * outputs for inputs, outputs in self.products) + self.other_weights

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return self.layers * self.layer_weights + self.embedding_weights + self.head_weights

    @property
    def attention_flops(self) -> float:
        """Operations of the forward's scores and weighted values."""
        return 4.0 * self.context * self.attention_width

    @property
    def flops(self) -> float:
        """Necessary operations of a token through all layers and the head, forward and backward, without recomputation,
        as `flops.per_token` counts them."""
        head = 2.0 * self.hidden_size * self.vocabulary_size
        return 3 * (self.layers * self.layer_flops + self.head_share * head)

    @property
    def layer_flops(self) -> float:
        """Operations of a layer's forward."""
        return 2.0 * sum(inputs * outputs for inputs, outputs in self.products) + self.attention_flops

    @property
    def keys_width(self) -> float:
        """Elements of a token's keys, or of its values."""
        return self.attention_width * self.key_value_heads / self.heads

    @property
    def feed_forward_traffic(self) -> float:
        """Bytes that the feed-forward part's pointwise operations read and write in the forward."""
        return float((GATED_TRAFFIC if self.gated else PLAIN_TRAFFIC) * self.feed_forward)

    @property
    def scores_traffic(self) -> float:
        """Bytes that scores read and write in the forward, where attention keeps them."""
        return float(SCORES_TRAFFIC * self.heads * self.sequence_length)


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
