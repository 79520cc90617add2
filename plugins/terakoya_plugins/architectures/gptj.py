"""GPT-J (Wang and Komatsuzaki, 2021): rotary positions on a part of each head, attention and feed-forward side by side.

Transformers' GPT-J has its own attention, with its softmax in float32, and adds the mask it is handed to its scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from terakoya import hookimpl
from terakoya.components import Architecture, Head, TensorPartition
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import GPTJConfig, PreTrainedModel


class GPTJ(Architecture):
    """Fields bear the names of Transformers' `GPTJConfig`; defaults are GPT-J 6B's."""

    heads: ClassVar[frozenset[Head]] = frozenset({"causal"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "mask4d"
    trial: ClassVar[Mapping[str, Any]] = {"rotary_dim": 2}

    hidden_size: PositiveInt = 4096
    num_hidden_layers: PositiveInt = 28
    num_attention_heads: PositiveInt = 16
    rotary_dim: PositiveInt = 64
    """How many numbers of each head turn with the position."""
    n_inner: PositiveInt | None = None
    """The width of the feed-forward layers; four times `hidden_size` where not given."""
    activation_function: str = "gelu_new"
    max_position_embeddings: PositiveInt = 2048
    resid_pdrop: NonNegativeFloat = 0.0
    embd_pdrop: NonNegativeFloat = 0.0
    attn_pdrop: NonNegativeFloat = 0.0
    layer_norm_epsilon: NonNegativeFloat = 1e-5
    initializer_range: NonNegativeFloat = 0.02
    tie_word_embeddings: bool = False
    scaled_init: bool = False
    """Whether output layers begin smaller by sqrt(2 x layers), as Megatron-LM's do."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} over {self.num_attention_heads} heads is no whole number")
        if self.rotary_dim % 2 or self.rotary_dim > self.hidden_size // self.num_attention_heads:
            raise ValueError(
                f"rotary_dim: expected an even number of at most {self.hidden_size // self.num_attention_heads}, the "
                f"size of a head, got {self.rotary_dim}"
            )
        return self

    def config(self, vocabulary: Vocabulary) -> GPTJConfig:
        """The `GPTJConfig`, its special ids and vocabulary size from `vocabulary`."""
        from transformers import GPTJConfig

        from terakoya.toolkit.architectures.decoder_models import special_ids

        return GPTJConfig(
            **self.model_dump(exclude={"scaled_init"}), vocab_size=vocabulary.size, **special_ids(vocabulary)
        )

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`GPTJForCausalLM`."""
        from transformers import GPTJForCausalLM

        from terakoya.toolkit.architectures.decoder_models import fuse_gelu, scale_output_layers

        model = GPTJForCausalLM(self.config(vocabulary))
        if self.scaled_init:
            scale_output_layers(model, "out_proj", "fc_out", layers=self.num_hidden_layers)
        fuse_gelu(model)
        return model

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H); a position sees its own document up to itself."""
        from terakoya.toolkit.architectures import decoder_models

        return decoder_models.hidden_by_mask(model, batch)

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.lm_head(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The layers."""
        return list(model.base_model.h)

    def tensor_partition(self) -> TensorPartition:
        """Heads and the middle of the feed-forward."""
        return TensorPartition(
            sizes={
                "num_attention_heads": self.num_attention_heads,
                "n_inner": self.n_inner or 4 * self.hidden_size,
            },
            entries=("attn", "mlp"),
            columns={"attn.q_proj": 1, "attn.k_proj": 1, "attn.v_proj": 1, "mlp.fc_in": 1},
            rows=("attn.out_proj", "mlp.fc_out"),
            counts={"attn": ("num_attention_heads",)},
        )

    def cut(self, model: PreTrainedModel, kept: range) -> None:
        """See `decoder_models.keep_blocks`."""
        from torch.nn import Identity

        from terakoya.toolkit.architectures import decoder_models

        decoder_models.keep_blocks(model, kept, blocks="h", norm="ln_f", before={"drop": Identity()})

    def max_sequence_length(self) -> int:
        """What its table of positions holds."""
        return self.max_position_embeddings


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `gptj`."""
    return {"gptj": GPTJ}
