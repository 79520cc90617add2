"""T5 (Raffel et al., 2020, arXiv:1910.10683): an encoder and a decoder with relative position biases.

T5 has three masks, in the encoder, in the decoder and between the two, and passes them to its layers itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.encoder_decoder import EncoderDecoderArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class T5(EncoderDecoderArchitecture):
    """Fields have the names of Transformers' `T5Config`; defaults are T5-base's."""

    config_class = "T5Config"
    model_classes: ClassVar = {"seq2seq": "T5ForConditionalGeneration"}

    d_model: PositiveInt = 768
    d_kv: PositiveInt = 64
    d_ff: PositiveInt = 3072
    num_layers: PositiveInt = 12
    num_decoder_layers: PositiveInt | None = None
    """Null is as many as `num_layers`."""
    num_heads: PositiveInt = 12
    relative_attention_num_buckets: PositiveInt = 32
    relative_attention_max_distance: PositiveInt = 128
    dropout_rate: NonNegativeFloat = 0.1
    layer_norm_epsilon: PositiveFloat = 1e-6
    initializer_factor: PositiveFloat = 1.0
    feed_forward_proj: Literal["relu", "gated-gelu"] = "relu"
    """`gated-gelu` is that of T5 1.1. T5 1.1's untied vocabulary head is not supported: Transformers' T5 ties it."""

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the vocabulary logits (..., V) of `hidden` (..., H), which is scaled for the tied head."""
        return model.lm_head(hidden * model.config.d_model**-0.5)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `t5`."""
    return {"t5": T5}
