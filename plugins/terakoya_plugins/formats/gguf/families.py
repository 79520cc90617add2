"""The models that llama.cpp runs as they are, and why others cannot be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES: Mapping[str, str] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",  # the same block; llama.cpp has no other name for it
    "qwen3": "qwen3",
    "olmo2": "olmo2",
    "gemma3_text": "gemma3",
}
"""`model_type` of a model that can be written -> what llama.cpp calls it."""
INTERLEAVED = ("llama", "mistral")
"""The families whose pairs of rotary dimensions are neighbours in llama.cpp."""
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "llama": ("linear", "yarn", "llama3"),
    "qwen3": ("linear", "yarn"),
    "olmo2": ("linear", "yarn"),
    "gemma3": ("linear",),  # llama.cpp would apply "yarn" to the local layers, too
}
"""llama.cpp's name -> the scaled rotary positions that its code has for it."""
GEMMA_27B = 62
"""With this number of layers llama.cpp scales attention scores as the 27B does, by the width of the model."""


def check_model(model: PreTrainedModel) -> None:
    """Raises UserError if llama.cpp would compute `model` otherwise, or does not have it."""
    config: Any = model.config
    if config.model_type not in NAMES or not model.can_generate():
        raise UserError(
            f"format gguf: llama.cpp runs {', '.join(NAMES)} of the models here, got {type(model).__name__}; use "
            "--format onnx or --format sentence_transformers"
        )
    for feature in _foreign_features(config):
        raise UserError(f"format gguf: llama.cpp's {NAMES[config.model_type]} does not have {feature}")


def _foreign_features(config: Any) -> Iterator[str]:
    """Yields what the model of `config` has and llama.cpp's code for it does not."""
    family = config.model_type
    if family == "gpt2":
        if config.activation_function not in TANH_GELU:
            yield config.activation_function
        if not config.scale_attn_weights:
            yield "attention that is not scaled"
        if config.scale_attn_by_inverse_layer_idx:
            yield "attention that is scaled by the layer's number"
        return
    rotary = config.rope_parameters
    activation = config.hidden_activation if family == "gemma3_text" else config.hidden_act
    if activation not in (TANH_GELU if family == "gemma3_text" else ("silu",)):
        yield activation
    if family == "gemma3_text":
        rotary = rotary["full_attention"]
        scaled_by = config.hidden_size // config.num_attention_heads
        scaled_by = scaled_by if config.num_hidden_layers == GEMMA_27B else config.head_dim
        if config.query_pre_attn_scalar != scaled_by:
            yield f"query_pre_attn_scalar {config.query_pre_attn_scalar}, only {scaled_by} in a model of this shape"
    if (kind := rotary["rope_type"]) not in ("default", *SCALINGS[NAMES[family]]):
        yield f"rotary positions of type {kind}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        yield "biases"
    window = config.sliding_window if family == "mistral" else None
    if getattr(config, "use_sliding_window", False) or (window and window < config.max_position_embeddings):
        yield "a sliding window"
