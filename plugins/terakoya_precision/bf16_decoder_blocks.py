"""Attention with rotary positions in the bf16 stream: rotations without the passes of Transformers' formula, forward
and backward.

Each class below is mixed into classes of Transformers, whose modules, weights and names stay. See
docs/design/bf16-stream.md.

Letters in shapes: B rows, T positions, N heads, D size of a head, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from terakoya_precision.bf16_encoder_blocks import IS_ONE, branch, copies_of, has_hooks, need_gradients, projections
from terakoya_precision.bf16_functions import Products, Rotation

ROTARY_ATTENTIONS = (
    ("llama", "LlamaAttention"),
    ("mistral", "MistralAttention"),
    ("qwen3", "Qwen3Attention"),
    ("gemma3", "Gemma3Attention"),
    ("eurobert", "EuroBertAttention"),
)
ATTENTIONS_WITH_WIDE_NORMS = (("olmo2", "Olmo2Attention"),)
MODERNBERT_ATTENTIONS = (
    ("modernbert", "ModernBertAttention"),
    ("modernbert_decoder", "ModernBertDecoderAttention"),
)
"""Families and classes of Transformers that the classes below are mixed into."""


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions; with a cache it is that of Transformers. Norms of queries and keys, where a
    family has them, are those of each head."""

    config: Any
    head_dim: int
    attention_dropout: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **further: Any,
    ) -> Any:
        """Returns what attention and the layer behind it make of `hidden_states` (B, T, H), and what else the
        attention's function returns. `position_embeddings` are cosines and sines (B, T, D)."""
        kind = self.config._attn_implementation
        if past_key_values is not None or position_embeddings is None or kind == "eager":
            cache = {} if past_key_values is None else {"past_key_values": past_key_values}
            return super().forward(hidden_states, position_embeddings, attention_mask, **cache, **further)
        query, key, value = self.heads(hidden_states)
        cos, sin = (each.unsqueeze(2) for each in position_embeddings)
        query, key = Rotation.apply(query, key, cos, sin)
        attended, weights = ALL_ATTENTION_FUNCTIONS[kind](
            self, *(each.transpose(1, 2) for each in (query, key, value)), attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=getattr(self, "scaling", self.head_dim**-0.5),
            sliding_window=getattr(self, "sliding_window", getattr(self.config, "sliding_window", None)), **further,
        )  # fmt: skip
        return self.output(attended.flatten(2)), weights

    def heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values (B, T, N, D), before the rotation."""
        parts: Any = self
        query, key, value = (each.unflatten(-1, (-1, self.head_dim)) for each in self.products(hidden_states))
        if hasattr(self, "q_norm"):
            query, key = parts.q_norm(query), parts.k_norm(key)
        return query, key, value

    def products(self, hidden_states: Tensor) -> Sequence[Tensor]:
        """Returns queries, keys and values (B, T, N D), by one product where gradients are needed."""
        layers = projections(self)
        if getattr(self, IS_ONE, False) and need_gradients(hidden_states, *layers) and not has_hooks(*layers):
            return branch(Products, layers, hidden_states, copies_of(self))
        return [layer(hidden_states) for layer in layers]

    def output(self, attended: Tensor) -> Tensor:
        """Returns what the layer behind attention makes of `attended` (B, T, N D): (B, T, H)."""
        parts: Any = self
        states: Tensor = parts.o_proj(attended)
        return states


class WideNormAttention(RotaryAttention):
    """Norms of queries and keys are those of all heads together."""

    def heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts: Any = self
        query, key, value = self.products(hidden_states)
        states = parts.q_norm(query), parts.k_norm(key), value
        query, key, value = (each.unflatten(-1, (-1, self.head_dim)) for each in states)
        return query, key, value


class ModernBertAttention(RotaryAttention):
    """Queries, keys and values are those of one layer in the encoder; dropout follows."""

    def heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts: Any = self
        if not hasattr(self, "Wqkv"):
            return super().heads(hidden_states)
        query, key, value = parts.Wqkv(hidden_states).unflatten(-1, (3, -1, self.head_dim)).unbind(-3)
        return query, key, value

    def output(self, attended: Tensor) -> Tensor:
        parts: Any = self
        states: Tensor = parts.out_drop(parts.Wo(attended))
        return states
