"""Reads from the arguments in a Megatron checkpoint which model it contains; refuses models that are not supported.

Arguments may be those of Megatron-LM or Megatron-DeepSpeed; some have a different name in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya_megatron import weights
from terakoya_megatron.weights import Gpt

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], ())
"""Values of an argument that is not used."""

UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_experts": ((*OFF, 1, [1]), "a mixture of experts"),
    "multi_latent_attention": (OFF, "multi-latent attention"),
    "experimental_attention_variant": (OFF, "another kind of attention"),
    "qk_layernorm": (OFF, "norms of queries and keys"),
    "attention_output_gate": (OFF, "gated attention"),
    "softmax_type": ((*OFF, "vanilla"), "a softmax with an offset"),
    "window_size": (OFF, "sliding-window attention"),
    "rotary_interleaved": (OFF, "interleaved rotary positions"),
    "rotary_percent": ((*OFF, 1, 1.0), "rotary positions on a part of each head"),
    "rotary_seq_len_interpolation_factor": ((*OFF, 1), "interpolated rotary positions"),
    "use_rope_scaling": (OFF, "scaled rotary positions"),
    "no_rope_freq": (OFF, "layers without rotary positions"),
    "apply_layernorm_1p": (OFF, "norms that add 1 to their weights"),
    "apply_residual_connection_post_layernorm": (OFF, "residual connections after the norm"),
    "squared_relu": (OFF, "a squared ReLU"),
    "quick_geglu": (OFF, "a gated GELU"),
    "mtp_num_layers": (OFF, "multi-token prediction"),
    "hybrid_override_pattern": (OFF, "layers of several kinds"),
    "hybrid_layer_pattern": (OFF, "layers of several kinds"),
    "heterogeneous_layers_config_path": (OFF, "layers of several kinds"),
    "heterogeneous_layers_config_encoded_json": (OFF, "layers of several kinds"),
    "position_embedding_type": ((None, "learned_absolute", "rope", "none"), "this kind of positions"),
}
"""Arguments for models that cannot be imported: name -> (harmless values, what the argument means)."""


def read_model(arguments: Any, source: Path) -> Gpt:
    """Returns the model that the checkpoint's `arguments`, a namespace, describe.

    Raises:
        UserError: no arguments, a missing argument, or a model that is neither like a Llama nor like a GPT-2.
    """
    if arguments is None or not hasattr(arguments, "__dict__"):
        raise UserError(f"{source}: has no arguments (`args`), which describe the model")
    given: dict[str, Any] = dict(vars(arguments))
    _normalise(given)
    problems = [
        f"{name} is {given[name]!r}: {meaning}, which cannot be imported"
        for name, (harmless, meaning) in UNSUPPORTED.items()
        if name in given and not any(given[name] == value for value in harmless)
    ]
    needed = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    problems += [f"the arguments have no {name}" for name in needed if not given.get(name)]
    if problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in problems))
    rotary = given["position_embedding_type"] == "rope"
    rms = str(given.get("normalization") or "LayerNorm").lower() == "rmsnorm"
    gated = bool(given.get("swiglu"))
    biases = bool(given.get("add_bias_linear", True))
    if not (rotary == rms == gated) or given["position_embedding_type"] not in ("rope", "learned_absolute"):
        raise UserError(
            f"{source}: expected a Llama (rotary positions, RMSNorm, SwiGLU) or a GPT-2 (learned positions, LayerNorm, "
            f"GELU), got position_embedding_type {given['position_embedding_type']!r}, normalization "
            f"{given.get('normalization') or 'LayerNorm'!r}, swiglu {gated}"
        )
    heads, hidden = int(given["num_attention_heads"]), int(given["hidden_size"])
    groups = heads
    if given.get("group_query_attention", True):
        groups = int(given.get("num_query_groups") or given.get("num_key_value_heads") or heads)
    model = Gpt(
        family="llama" if rotary else "gpt2",
        layers=int(given["num_layers"]),
        hidden_size=hidden,
        heads=heads,
        groups=groups,
        head_size=int(given.get("kv_channels") or hidden // heads),
        intermediate_size=int(given.get("ffn_hidden_size") or 4 * hidden),
        positions=int(given["max_position_embeddings"]),
        norm_epsilon=float(given.get("norm_epsilon") or given.get("layernorm_epsilon") or 1e-5),
        rope_theta=float(given.get("rotary_base") or given.get("rope_theta") or 10000),
        tied=not given.get("untie_embeddings_and_output_weights", False),
        biases=biases,
        activation="silu" if gated else _gelu(given),
        initializer_range=float(given.get("init_method_std") or 0.02),
    )
    if model.family == "llama" and not biases and given.get("add_qkv_bias"):
        raise UserError(f"{source}: add_qkv_bias is True: biases only of queries, keys and values, which no Llama has")
    if model.family == "gpt2" and (not biases or groups != heads or heads * model.head_size != hidden):
        raise UserError(
            f"{source}: expected a GPT-2 (biases everywhere, as many key heads as query heads, heads that fill the "
            f"hidden size), got add_bias_linear {biases}, {heads} heads of {model.head_size}, {groups} key heads, "
            f"hidden size {hidden}"
        )
    return model


def _normalise(given: dict[str, Any]) -> None:
    """Replaces alternative names and forms of the arguments in `given` by one."""
    if "add_bias_linear" not in given and given.get("disable_bias_linear"):
        given["add_bias_linear"] = False
    positions = given.get("position_embedding_type")
    if positions is not None and not isinstance(positions, str):  # an enumeration of Megatron-DeepSpeed
        value = next(iter(getattr(positions, "args", ())[-1:]), positions)
        positions = {1: "rope", 2: "learned_absolute", "rotary": "rope", "absolute": "learned_absolute"}.get(value)
        given["position_embedding_type"] = positions or f"{value}"
    if given.get("use_rotary_position_embeddings"):
        given["position_embedding_type"] = "rope"
    given["position_embedding_type"] = given.get("position_embedding_type") or "learned_absolute"
    if given["position_embedding_type"] == "learned_absolute" and given.get("add_position_embedding") is False:
        given["position_embedding_type"] = "none"


def _gelu(given: Mapping[str, Any]) -> str:
    """Transformers' name of the GELU. Megatron's fused GELU is the tanh approximation, its plain GELU is exact."""
    approximate = given.get("bias_gelu_fusion") or given.get("openai_gelu")
    return "gelu_new" if approximate else "gelu"


def transformers_config(model: Gpt, vocabulary: int) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Returns the Transformers class and config of `model` with `vocabulary` pieces and without special tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shared: dict[str, Any] = {
        "vocab_size": vocabulary,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.family == "gpt2":
        return GPT2LMHeadModel, GPT2Config(
            n_embd=model.hidden_size,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=None if model.intermediate_size == 4 * model.hidden_size else model.intermediate_size,
            n_positions=model.positions,
            activation_function=model.activation,
            layer_norm_epsilon=model.norm_epsilon,
            **shared,
        )
    return LlamaForCausalLM, LlamaConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.groups,
        head_dim=model.head_size,
        intermediate_size=model.intermediate_size,
        max_position_embeddings=model.positions,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        attention_bias=model.biases,
        mlp_bias=model.biases,
        **shared,
    )


def write_transformers(
    megatron_weights: Mapping[str, Tensor], model: Gpt, vocab_size: int | None, folder: Path, out: Path
) -> None:
    """Writes the full weights of the checkpoint `folder`, under Megatron-Core's names, to the Transformers folder
    `out`, without the embedding rows beyond `vocab_size`.

    Raises:
        UserError: weights are unknown, or do not fit the model.
    """
    from terakoya.toolkit.formats import from_state_dict

    unpadded = weights.remove_vocabulary_padding(megatron_weights, vocab_size, folder)
    state, unknown = weights.to_transformers(unpadded, model)
    if unknown:
        raise UserError(f"{folder}: has unknown weights: {from_state_dict.join_names(sorted(unknown))}")
    embeddings = state[weights.NAMES[model.family][weights.WORD_EMBEDDINGS]]
    model_class, config = transformers_config(model, len(embeddings))
    from_state_dict.write_model(model_class, config, state, folder, out)
