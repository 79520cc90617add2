"""T5 (Raffel et al., 2020, arXiv:1910.10683): an encoder and a decoder with relative position biases.

T5 has three masks, in the encoder, in the decoder and between the two, and passes them to its layers itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.encoder_decoder import EncoderDecoderArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class T5(EncoderDecoderArchitecture):
    """Fields have the names of Transformers' `T5Config`; defaults are T5-base's."""

    config_class = "T5Config"
    bf16_stream = True
    model_classes: ClassVar = {"seq2seq": "T5ForConditionalGeneration"}
    output_layers = ("o", "wo")

    d_model: shared.HiddenSize = 768
    d_kv: shared.HeadDim = 64
    d_ff: shared.IntermediateSize = 3072
    num_layers: PositiveInt = 12
    """Number of blocks of the encoder."""
    num_decoder_layers: PositiveInt | None = None
    """Number of blocks of the decoder; null is as many as `num_layers`."""
    num_heads: PositiveInt = 12
    """Number of attention heads of each block."""
    relative_attention_num_buckets: PositiveInt = 32
    """Number of buckets of distances between positions; each has a learned attention bias."""
    relative_attention_max_distance: PositiveInt = 128
    """The distance from which all positions share the last bucket. Unit: tokens."""
    dropout_rate: NonNegativeFloat = 0.1
    """The dropout probability of all layers."""
    layer_norm_epsilon: PositiveFloat = 1e-6
    """A small number that norms add to the variance, against division by zero."""
    initializer_factor: PositiveFloat = 1.0
    """The standard deviations of the initial weights are multiplied by this."""
    feed_forward_proj: Literal["relu", "gated-gelu"] = "relu"
    """`gated-gelu` is that of T5 1.1. T5 1.1's untied vocabulary head is not supported: Transformers' T5 ties it."""

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the vocabulary logits (..., V) of `hidden` (..., H), which is scaled for the tied head."""
        return model.lm_head(hidden * model.config.d_model**-0.5)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"t5": T5}
