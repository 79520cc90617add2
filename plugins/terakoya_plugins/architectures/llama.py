"""Llama (Touvron et al., 2023, arXiv:2302.13971): rotary positions, RMS norms, SwiGLU, no biases; heads that share keys
and values (Ainslie et al., 2023, arXiv:2305.13245)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from terakoya import hookimpl
from terakoya.components import Architecture, Head, TensorPartition
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PreTrainedModel


class Llama(Architecture):
    """Fields bear the names of Transformers' `LlamaConfig`; defaults are the first 7B's."""

    heads: ClassVar[frozenset[Head]] = frozenset({"causal"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "interface"
    trial: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2}

    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    """Heads of keys and values, each shared by as many neighbouring ones of queries; one for each where not given."""
    hidden_act: str = "silu"
    max_position_embeddings: PositiveInt = 2048
    initializer_range: NonNegativeFloat = 0.02
    rms_norm_eps: NonNegativeFloat = 1e-6
    rope_theta: PositiveFloat = 10_000.0
    attention_dropout: NonNegativeFloat = 0.0
    tie_word_embeddings: bool = False
    scaled_init: bool = False
    """Whether output layers begin smaller by sqrt(2 x layers), as Megatron-LM's do."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_attention_heads} heads is no even number, which rotary "
                "positions need"
            )
        shared = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % shared:
            raise ValueError(f"{self.num_attention_heads} heads cannot share {shared} num_key_value_heads evenly")
        return self

    def config(self, vocabulary: Vocabulary) -> LlamaConfig:
        """The `LlamaConfig`, its special ids and vocabulary size from `vocabulary`."""
        from transformers import LlamaConfig

        from terakoya.toolkit.architectures.decoder_models import special_ids

        return LlamaConfig(
            **self.model_dump(exclude={"scaled_init", "rope_theta"}),
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            vocab_size=vocabulary.size,
            **special_ids(vocabulary),
        )

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`LlamaForCausalLM`."""
        from transformers import LlamaForCausalLM

        from terakoya.toolkit.architectures.decoder_models import scale_output_layers

        model = LlamaForCausalLM(self.config(vocabulary))
        if self.scaled_init:
            scale_output_layers(model, "o_proj", "down_proj", layers=self.num_hidden_layers)
        return model

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H); a position sees its own document up to itself."""
        from terakoya.toolkit.architectures import decoder_models

        return decoder_models.hidden(model, batch)

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.lm_head(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The layers."""
        return list(model.base_model.layers)

    def tensor_partition(self) -> TensorPartition:
        """Heads, those of keys and values with the queries that share them, and the middle of the feed-forward."""
        from terakoya.toolkit.architectures import decoder_models

        return decoder_models.gated_partition(
            self.num_attention_heads, self.num_key_value_heads, self.intermediate_size
        )

    def cut(self, model: PreTrainedModel, kept: range) -> None:
        """See `decoder_models.keep_blocks`."""
        from terakoya.toolkit.architectures import decoder_models

        decoder_models.keep_blocks(model, kept, blocks="layers", norm="norm", before={})

    def max_sequence_length(self) -> int:
        """What its rotary positions are made for."""
        return self.max_position_embeddings


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `llama`."""
    return {"llama": Llama}
