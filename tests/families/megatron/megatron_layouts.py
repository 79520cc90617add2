"""Checkpoints laid out by Megatron-LM's, Megatron-DeepSpeed's and SageMaker's published formats, weight by weight.

Written from the formats' descriptions alone, head by head, without the importers' or the exporter's own code.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from published_layouts import NO_TOKENS, perturbed
from torch import Tensor
from transformers import GPTJConfig, GPTJForCausalLM, LlamaForCausalLM, PreTrainedModel

# ------------------------------------------------------------------------------------------------------- Megatron


def arguments(model: PreTrainedModel, *, tp: int, pp: int, **changes: Any) -> Namespace:
    """The arguments a Megatron-LM checkpoint of `model` holds."""
    config = model.config
    shared = {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "num_experts": None,
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads, "max_position_embeddings": config.max_position_embeddings,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings, "init_method_std": 0.01,
        "params_dtype": torch.float32, "seq_length": 40, "norm_epsilon": 1e-5,
    }  # fmt: skip
    if isinstance(model, LlamaForCausalLM):
        own: dict[str, Any] = {
            "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_base": 500,
            "group_query_attention": True, "num_query_groups": config.num_key_value_heads, "kv_channels": 6,
            "ffn_hidden_size": 48, "add_bias_linear": config.mlp_bias, "rotary_percent": 1.0,
            "rotary_interleaved": False, "bias_gelu_fusion": False,
        }  # fmt: skip
    else:
        own = {
            "swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
            "group_query_attention": False, "num_query_groups": 1, "kv_channels": 8, "ffn_hidden_size": 48,
            "add_bias_linear": True, "bias_gelu_fusion": config.activation_function == "gelu_new",
        }  # fmt: skip
    return Namespace(**{**shared, **own, **changes})


def padded(words: Tensor, tp: int) -> Tensor:
    """Embeddings (V, H) with rows up to a multiple of 128 x tensor-parallel size, as Megatron makes them."""
    rows = -(-len(words) // (128 * tp)) * 128 * tp
    filled = torch.full((rows, words.shape[1]), 7.0)
    filled[: len(words)] = words
    return filled


def part(value: Tensor, rank: int, tp: int, dimension: int = 0) -> Tensor:
    """What rank `rank` of `tp` has of `value`."""
    size = value.shape[dimension] // tp
    return value.narrow(dimension, rank * size, size).clone()


def fused_heads(query: Tensor, key: Tensor, value: Tensor, *, groups: int, head_size: int) -> Tensor:
    """For each group its query heads, its key head, its value head, stacked in that order."""
    per_group = len(query) // head_size // groups
    rows = []
    for group in range(groups):
        for head in range(group * per_group, (group + 1) * per_group):
            rows.append(query[head * head_size : (head + 1) * head_size])
        rows.append(key[group * head_size : (group + 1) * head_size])
        rows.append(value[group * head_size : (group + 1) * head_size])
    return torch.cat(rows)


def layer_weights(model: PreTrainedModel, layer: int, rank: int, tp: int) -> Iterator[tuple[str, Tensor]]:
    """One layer of one tensor-parallel rank, by the names of Megatron-Core's local layers."""
    config = model.config
    if isinstance(model, LlamaForCausalLM):
        block = model.model.layers[layer]
        attention, mlp = block.self_attn, block.mlp
        groups, head = config.num_key_value_heads // tp, config.head_dim
        yield "input_layernorm.weight", block.input_layernorm.weight
        yield "pre_mlp_layernorm.weight", block.post_attention_layernorm.weight
        for end in ("weight", "bias") if config.mlp_bias else ("weight",):
            heads = [
                part(getattr(each, end), rank, tp) for each in (attention.q_proj, attention.k_proj, attention.v_proj)
            ]
            yield f"self_attention.linear_qkv.{end}", fused_heads(*heads, groups=groups, head_size=head)
            halves = [part(getattr(each, end), rank, tp) for each in (mlp.gate_proj, mlp.up_proj)]
            yield f"mlp.linear_fc1.{end}", torch.cat(halves)
        yield "self_attention.linear_proj.weight", part(attention.o_proj.weight, rank, tp, 1)
        yield "mlp.linear_fc2.weight", part(mlp.down_proj.weight, rank, tp, 1)
        if config.mlp_bias:
            yield "self_attention.linear_proj.bias", attention.o_proj.bias
            yield "mlp.linear_fc2.bias", mlp.down_proj.bias
        return
    block = model.transformer.h[layer]
    heads, head = config.n_head // tp, config.n_embd // config.n_head
    for end in ("weight", "bias"):
        turned = [
            each.T if end == "weight" else each for each in getattr(block.attn.c_attn, end).split(config.n_embd, -1)
        ]
        parts = [part(each, rank, tp) for each in turned]
        yield f"self_attention.linear_qkv.{end}", fused_heads(*parts, groups=heads, head_size=head)
        yield f"input_layernorm.{end}", getattr(block.ln_1, end)
        yield f"pre_mlp_layernorm.{end}", getattr(block.ln_2, end)
    yield "self_attention.linear_proj.weight", part(block.attn.c_proj.weight.T, rank, tp, 1)
    yield "self_attention.linear_proj.bias", block.attn.c_proj.bias
    yield "mlp.linear_fc1.weight", part(block.mlp.c_fc.weight.T, rank, tp)
    yield "mlp.linear_fc1.bias", part(block.mlp.c_fc.bias, rank, tp)
    yield "mlp.linear_fc2.weight", part(block.mlp.c_proj.weight.T, rank, tp, 1)
    yield "mlp.linear_fc2.bias", block.mlp.c_proj.bias


ENGINE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "input_layernorm.bias": "self_attention.linear_qkv.layer_norm_bias",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.bias": "mlp.linear_fc1.layer_norm_bias",
}


def megatron(model: PreTrainedModel, root: Path, *, tp: int, pp: int, engine: bool = False, **changes: Any) -> Path:
    """A Megatron-LM checkpoint of `model` in `root`: one file for each of `tp` x `pp` ranks; returns `root`."""
    config = model.config
    is_llama = isinstance(model, LlamaForCausalLM)
    words = padded(model.get_input_embeddings().weight.detach(), tp)
    output = padded(model.get_output_embeddings().weight.detach(), tp)
    norm = model.model.norm if is_llama else model.transformer.ln_f
    for rank in range(tp):
        for stage in range(pp):
            own: dict[str, Tensor | None] = {}
            if stage == 0:
                own["embedding.word_embeddings.weight"] = part(words, rank, tp)
                if not is_llama:
                    own["embedding.position_embeddings.weight"] = model.transformer.wpe.weight
            layers = config.num_hidden_layers // pp
            for layer in range(layers):
                for name, value in layer_weights(model, stage * layers + layer, rank, tp):
                    own[f"decoder.layers.{layer}.{ENGINE.get(name, name) if engine else name}"] = value
                own[f"decoder.layers.{layer}.mlp.linear_fc1._extra_state"] = None
            if stage == pp - 1:
                own["decoder.final_layernorm.weight"] = norm.weight
                if not is_llama:
                    own["decoder.final_layernorm.bias"] = norm.bias
                if not config.tie_word_embeddings or pp > 1:
                    own["output_layer.weight"] = part(output, rank, tp)
            folder = root / "iter_0000042" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            folder.mkdir(parents=True)
            saved = {
                "args": arguments(model, tp=tp, pp=pp, **changes),
                "checkpoint_version": 3.0,
                "iteration": 42,
                "model": {name: value.detach() if value is not None else None for name, value in own.items()},
            }
            torch.save(saved, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("42")
    return root


# --------------------------------------------------------------------------------------------- Megatron-DeepSpeed

PIPELINE_NAMES = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
}


def old_order(fused: Tensor, *, heads: int, head_size: int, version: float) -> Tensor:
    """`fused`, one head's query, key and value after the other's, in the order of checkpoint version 0 or 1."""
    row = {}
    for head in range(heads):
        for kind in range(3):
            for place in range(head_size):
                source = (head * 3 + kind) * head_size + place
                if version == 0:
                    row[(kind * heads + head) * head_size + place] = source
                else:
                    row[(head * head_size + place) * 3 + kind] = source
    return fused[[row[index] for index in range(len(fused))]]


def megatron_deepspeed(model: PreTrainedModel, root: Path, *, tp: int, version: float = 3.0, **changes: Any) -> Path:
    """A Megatron-DeepSpeed checkpoint of `model`: one file for each layer and tensor-parallel rank; returns `root`.

    The embeddings are layer 1, what comes between them and the first block has no weights, the last norm follows.
    """
    config = model.config
    is_llama = isinstance(model, LlamaForCausalLM)
    folder = root / "global_step1000"
    folder.mkdir(parents=True)
    words = padded(model.get_input_embeddings().weight.detach(), tp)
    norm = model.model.norm if is_llama else model.transformer.ln_f
    for rank in range(tp):
        layers: dict[int, dict[str, Tensor]] = {1: {"word_embeddings.weight": part(words, rank, tp)}}
        if not is_llama:
            layers[1]["position_embeddings.weight"] = model.transformer.wpe.weight
        for layer in range(config.num_hidden_layers):
            own = layers[3 + layer] = {}
            for name, value in layer_weights(model, layer, rank, tp):
                module, _, end = name.rpartition(".")
                if "linear_qkv" in name and version < 2:
                    heads = config.num_attention_heads // tp
                    value = old_order(value, heads=heads, head_size=value.shape[0] // 3 // heads, version=version)
                own[f"{PIPELINE_NAMES[module]}.{end}"] = value
        last = 4 + config.num_hidden_layers
        layers[last] = {"weight": norm.weight} if is_llama else {"weight": norm.weight, "bias": norm.bias}
        if not config.tie_word_embeddings:
            output = padded(model.get_output_embeddings().weight.detach(), tp)
            layers[last + 1] = {"lm_head.weight": part(output, rank, tp)}
        for number, own in layers.items():
            detached = {name: value.detach().clone() for name, value in own.items()}
            torch.save(detached, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    given = arguments(model, tp=tp, pp=1)
    del given.position_embedding_type, given.group_query_attention, given.num_query_groups, given.norm_epsilon
    given.use_rotary_position_embeddings = is_llama
    given.num_key_value_heads = config.num_key_value_heads if is_llama else config.num_attention_heads
    given.normalization = "rmsnorm" if is_llama else "layernorm"
    given.layernorm_epsilon, given.num_experts = 1e-5, [1]
    for name, value in changes.items():
        setattr(given, name, value)
    state = {"args": given, "checkpoint_version": version, "iteration": 1000, "module": None}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    (root / "latest").write_text("global_step1000")
    return root


# ------------------------------------------------------------------------------------------------- smdistributed


def gptj() -> GPTJForCausalLM:
    """A small GPT-J."""
    torch.manual_seed(3)
    config = GPTJConfig(
        vocab_size=150, n_embd=32, n_layer=3, n_head=4, n_positions=40, rotary_dim=4, **NO_TOKENS
    )  # fmt: skip
    return perturbed(GPTJForCausalLM(config))


def smdistributed(model: GPTJForCausalLM) -> dict[str, Tensor]:
    """The weights of `model` by the names of SageMaker's distributed transformer."""
    weights: dict[str, Tensor] = {}

    def put(name: str, module: torch.nn.Module) -> None:
        for end, value in module.named_parameters():
            weights[f"{name}.{end}"] = value.detach().clone()

    for number, block in enumerate(model.transformer.h):
        layer = f"transformer.seq_layers.{number}"
        put(f"{layer}.pre_layernorm", block.ln_1)
        put(f"{layer}.attention.query", block.attn.q_proj)
        put(f"{layer}.attention.key", block.attn.k_proj)
        put(f"{layer}.attention.value", block.attn.v_proj)
        put(f"{layer}.attention.dense", block.attn.out_proj)
        put(f"{layer}.output.dense1", block.mlp.fc_in)
        put(f"{layer}.output.dense2", block.mlp.fc_out)
    put("layernorm", model.transformer.ln_f)
    put("word_embedding", model.transformer.wte)
    put("lm_head", model.lm_head)
    return weights
