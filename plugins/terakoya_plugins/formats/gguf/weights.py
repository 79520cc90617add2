"""The settings and tensors of a causal model in GGUF, in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya_plugins.formats.gguf.families import INTERLEAVED, NAMES

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""The ends of GPT-2's matrices that Transformers keeps as (in, out); GGUF has (out, in)."""


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
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    rotary = config.rope_parameters
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
        writer.add_rope_freq_base_swa(rotary["sliding_attention"]["rope_theta"])
        rotary = rotary["full_attention"]
    _write_rotary(writer, rotary)


def _write_rotary(writer: GGUFWriter, rotary: Mapping[str, Any]) -> None:
    """Writes the base of rotary positions and how they are scaled; of "llama3" all is in `tensors`."""
    import gguf

    writer.add_rope_freq_base(rotary["rope_theta"])
    kind = rotary["rope_type"]
    if kind not in ("linear", "yarn"):
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rotary["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rotary.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rotary.get("beta_slow") or 1.0)
        if (attention := rotary.get("attention_factor")) is not None:  # llama.cpp multiplies its own factor by this
            writer.add_rope_scaling_attn_factors(attention / (1 + 0.1 * math.log(rotary["factor"])))


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields each tensor of `model` by its name in GGUF, in float32; a head tied to the embeddings is left out where
    llama.cpp ties it, too."""
    import gguf

    config: Any = model.config
    family = config.model_type
    architecture = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[NAMES[family]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings and family != "olmo2":
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise UserError(f"format gguf: llama.cpp's {NAMES[family]} has no tensor for {name}")
        if family == "gpt2" and name.endswith(TRANSPOSED):
            weight = weight.T
        if family in INTERLEAVED and name.endswith("q_proj.weight"):
            weight = interleave(weight, config.num_attention_heads)
        if family in INTERLEAVED and name.endswith("k_proj.weight"):
            weight = interleave(weight, config.num_key_value_heads)
        if family == "gemma3_text" and name.endswith("norm.weight"):  # llama.cpp multiplies by w, Gemma by 1 + w
            weight = weight + 1
        yield target, weight.detach().float().contiguous().numpy()
    if family in INTERLEAVED and config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", frequency_factors(model).numpy()


def frequency_factors(model: PreTrainedModel) -> Tensor:
    """Returns what llama.cpp divides the frequencies of rotary positions by, (D / 2,)."""
    import torch

    rotary: Any = model.base_model.rotary_emb
    scaled = rotary.inv_freq.float()
    exponents = torch.arange(len(scaled)) / len(scaled)
    return model.config.rope_parameters["rope_theta"] ** -exponents / scaled.cpu()


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Returns the rows of a projection (heads * D, H) in the order of llama.cpp's Llama, which rotates dimensions 2i
    and 2i + 1 of a head together; Transformers rotates i and i + D / 2."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
