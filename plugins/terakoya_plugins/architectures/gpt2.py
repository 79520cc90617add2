"""GPT-2 (Radford et al., 2019): a causal Transformer with learnt positions, norms before its layers, a tied head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from terakoya import hookimpl
from terakoya.components import Architecture, Head, TensorPartition
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import GPT2Config, PreTrainedModel


class GPT2(Architecture):
    """Fields bear the names of Transformers' `GPT2Config`; defaults are the smallest GPT-2's."""

    heads: ClassVar[frozenset[Head]] = frozenset({"causal"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "interface"

    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    n_inner: PositiveInt | None = None
    """The width of the feed-forward layers; four times `hidden_size` where not given."""
    activation_function: str = "gelu_new"
    max_position_embeddings: PositiveInt = 1024
    resid_pdrop: NonNegativeFloat = 0.1
    embd_pdrop: NonNegativeFloat = 0.1
    attn_pdrop: NonNegativeFloat = 0.1
    layer_norm_epsilon: NonNegativeFloat = 1e-5
    initializer_range: NonNegativeFloat = 0.02
    tie_word_embeddings: bool = True
    scaled_init: bool = True
    """Whether output layers begin smaller by sqrt(2 x layers), as GPT-2's did."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} over {self.num_attention_heads} heads is no whole number")
        return self

    def config(self, vocabulary: Vocabulary) -> GPT2Config:
        """The `GPT2Config`, its special ids and vocabulary size from `vocabulary`."""
        from transformers import GPT2Config

        from terakoya.toolkit.architectures.decoder_models import special_ids

        return GPT2Config(
            **self.model_dump(exclude={"scaled_init"}), vocab_size=vocabulary.size, **special_ids(vocabulary)
        )

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`GPT2LMHeadModel`."""
        from transformers import GPT2LMHeadModel

        from terakoya.toolkit.architectures.decoder_models import fuse_gelu, scale_output_layers

        model = GPT2LMHeadModel(self.config(vocabulary))
        if not self.scaled_init:  # Transformers has scaled them already
            scale_output_layers(model, "c_proj", layers=self.num_hidden_layers, down=False)
        fuse_gelu(model)
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
        return list(model.base_model.h)

    def tensor_partition(self) -> TensorPartition:
        """Heads, of which queries, keys and values come from one layer, and the middle of the feed-forward."""
        return TensorPartition(
            sizes={
                "num_attention_heads": self.num_attention_heads,
                "n_inner": self.n_inner or 4 * self.hidden_size,
            },
            entries=("attn", "mlp"),
            columns={"attn.c_attn": 3, "mlp.c_fc": 1},
            rows=("attn.c_proj", "mlp.c_proj"),
            counts={"attn": ("num_heads", "split_size")},
        )

    def cut(self, model: PreTrainedModel, kept: range) -> None:
        """See `decoder_models.keep_blocks`."""
        from torch.nn import Identity

        from terakoya.toolkit.architectures import decoder_models

        before = {"wpe": decoder_models.NoPositions(), "drop": Identity()}
        decoder_models.keep_blocks(model, kept, blocks="h", norm="ln_f", before=before)

    def max_sequence_length(self) -> int:
        """One position embedding for each position."""
        return self.max_position_embeddings


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `gpt2`."""
    return {"gpt2": GPT2}
