"""The settings and tensors of a causal model in GGUF, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

FAMILIES = ("gpt2", "llama", "qwen3")
"""The models that can be written, by `model_type`; llama.cpp has the same names."""
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""The ends of GPT-2's matrices that Transformers keeps as (in, out); GGUF has (out, in)."""


def check_model(model: PreTrainedModel) -> None:
    """Raises UserError if llama.cpp would compute `model` otherwise, or does not have it."""
    config: Any = model.config
    if config.model_type not in FAMILIES or not model.can_generate():
        raise UserError(
            f"format gguf: llama.cpp runs {', '.join(FAMILIES)} of the models here, got {type(model).__name__}; use "
            "--format onnx or --format sentence_transformers"
        )
    if config.model_type == "gpt2":
        features: tuple[tuple[bool, str], ...] = (
            (config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"), config.activation_function),
            (not config.scale_attn_weights, "attention that is not scaled"),
            (config.scale_attn_by_inverse_layer_idx, "attention that is scaled by the layer's number"),
        )
    else:
        rotary = config.rope_parameters.get("rope_type", "default")
        features = (
            (config.hidden_act != "silu", config.hidden_act),
            (rotary != "default", f"rotary positions of type {rotary}"),
            (bool(config.attention_bias or getattr(config, "mlp_bias", False)), "biases"),
            (bool(getattr(config, "use_sliding_window", False)), "a sliding window"),
        )
    for is_there, feature in features:
        if is_there:
            raise UserError(f"format gguf: llama.cpp's {config.model_type} does not have {feature}")


def write_settings(writer: GGUFWriter, model: PreTrainedModel) -> None:
    """Writes the sizes of `model`."""
    import gguf

    config: Any = model.config
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields each tensor of `model` by its name in GGUF, in float32; a head tied to the embeddings is left out."""
    import gguf

    config: Any = model.config
    architecture = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise UserError(f"format gguf: llama.cpp's {config.model_type} has no tensor for {name}")
        if config.model_type == "gpt2" and name.endswith(TRANSPOSED):
            weight = weight.T
        if config.model_type == "llama" and name.endswith("q_proj.weight"):
            weight = interleave(weight, config.num_attention_heads)
        if config.model_type == "llama" and name.endswith("k_proj.weight"):
            weight = interleave(weight, config.num_key_value_heads)
        yield target, weight.detach().float().contiguous().numpy()


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Returns the rows of a projection (heads * D, H) in the order of llama.cpp's Llama, which rotates dimensions 2i
    and 2i + 1 of a head together; Transformers rotates i and i + D / 2."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
