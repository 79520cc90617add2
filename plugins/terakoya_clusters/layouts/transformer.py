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
