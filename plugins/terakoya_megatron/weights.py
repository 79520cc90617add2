"""Megatron's GPT weights: their names and order in Transformers, and how tensor parallelism splits them.

Names are Megatron-Core's (`local` layers). `ALIASES` maps the names of Transformer Engine's layers to them;
Megatron-DeepSpeed has its own names. Letters in shapes: N heads, G groups of query heads that share a key and a value,
S head size.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from terakoya.errors import UserError

logger = logging.getLogger("terakoya")

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm"
LAYER = "decoder.layers"

ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}
"""Name in a layer of Transformer Engine, which fuses a norm with the next matrix -> name in Megatron-Core."""

Family = Literal["llama", "gpt2"]
SplitRule = Literal["rows", "columns", "gated rows", "same"]


@dataclass(frozen=True)
class Gpt:
    """A GPT as Megatron builds it. `family`: its model in Transformers; `biases`: whether linear layers have biases."""

    family: Family
    layers: int
    hidden_size: int
    heads: int
    groups: int
    head_size: int
    intermediate_size: int
    positions: int
    norm_epsilon: float
    rope_theta: float
    tied: bool
    biases: bool
    activation: str
    initializer_range: float


def split_rule(name: str, model: Gpt) -> SplitRule:
    """Returns how tensor parallelism splits the weight `name`: in its first or second dimension, or not at all.

    `gated rows`: the two halves of the first dimension, gate and up, are split separately.
    """
    if name in (WORD_EMBEDDINGS, OUTPUT) or ".self_attention.linear_qkv." in name:
        return "rows"
    if ".mlp.linear_fc1." in name:
        return "gated rows" if model.family == "llama" else "rows"
    if name.endswith(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")):
        return "columns"
    return "same"


def join_shards(shards: Sequence[Tensor], rule: SplitRule) -> Tensor | None:
    """Returns the full weight of `shards`, one per tensor-parallel rank; None if an unsplit weight differs."""
    if rule == "same":
        return shards[0] if all(torch.equal(shard, shards[0]) for shard in shards[1:]) else None
    if rule == "gated rows":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards), 1 if rule == "columns" else 0)


def split_shards(weight: Tensor, rule: SplitRule, ranks: int) -> list[Tensor]:
    """Returns the shard of `weight` for each tensor-parallel rank: the inverse of `join_shards`."""
    if rule == "same":
        return [weight] * ranks
    if rule == "gated rows":
        gate, up = weight.chunk(2)
        return [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    return list(weight.chunk(ranks, 1 if rule == "columns" else 0))


def split_heads(fused: Tensor, model: Gpt) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries (N S, ...), keys (G S, ...) and values (G S, ...) of `fused` (G (N/G + 2) S, ...)."""
    grouped = fused.reshape(model.groups, model.heads // model.groups + 2, model.head_size, *fused.shape[1:])
    return (
        grouped[:, :-2].reshape(-1, *fused.shape[1:]),
        grouped[:, -2].reshape(-1, *fused.shape[1:]),
        grouped[:, -1].reshape(-1, *fused.shape[1:]),
    )


def join_heads(query: Tensor, key: Tensor, value: Tensor, model: Gpt) -> Tensor:
    """Returns the fused matrix of queries, keys and values: the inverse of `split_heads`."""
    rest = query.shape[1:]
    parts = (part.reshape(model.groups, -1, model.head_size, *rest) for part in (query, key, value))
    return torch.cat(list(parts), 1).reshape(-1, *rest)


def remove_vocabulary_padding(weights: Mapping[str, Tensor], vocabulary: int | None, source: Path) -> dict[str, Tensor]:
    """Returns `weights` with `vocabulary` rows in embeddings and output layer; None keeps all rows.

    Raises:
        UserError: no embeddings, or fewer rows than `vocabulary`.
    """
    if WORD_EMBEDDINGS not in weights:
        raise UserError(f"{source}: has no {WORD_EMBEDDINGS}")
    rows = len(weights[WORD_EMBEDDINGS])
    if vocabulary is not None and vocabulary > rows:
        raise UserError(
            f"{source}: has {rows:,} pieces, fewer than the vocabulary's {vocabulary:,}; is it another tokenizer?"
        )
    if vocabulary is None:
        logger.warning(
            "%s: has %s pieces, padding included; a tokenizer or vocab_size gives the number without padding",
            source,
            f"{rows:,}",
        )
        return dict(weights)
    return {name: value[:vocabulary] if name in (WORD_EMBEDDINGS, OUTPUT) else value for name, value in weights.items()}


# ------------------------------------------------------------------------------------------- names in Transformers

NAMES: Mapping[Family, Mapping[str, str]] = {
    "llama": {
        WORD_EMBEDDINGS: "model.embed_tokens.weight",
        FINAL_NORM: "model.norm",
        OUTPUT: "lm_head.weight",
        LAYER: "model.layers",
        "input_layernorm": "input_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc2": "mlp.down_proj",
    },
    "gpt2": {
        WORD_EMBEDDINGS: "transformer.wte.weight",
        POSITION_EMBEDDINGS: "transformer.wpe.weight",
        FINAL_NORM: "transformer.ln_f",
        OUTPUT: "lm_head.weight",
        LAYER: "transformer.h",
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    },
}
"""Megatron-Core's name -> Transformers' name, of weights, of modules, and of the list of layers."""

LLAMA_FUSED = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Module of one fused matrix in Megatron-Core -> its modules in Llama."""

IN_LAYER = re.compile(re.escape(LAYER) + r"\.(\d+)\.(.+)\.(weight|bias)")


def to_transformers(weights: Mapping[str, Tensor], model: Gpt) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the full Megatron `weights` as Transformers' weights, and the names of those that are unknown."""
    state: dict[str, Tensor] = {}
    unknown: list[str] = []
    names = NAMES[model.family]
    for name, value in weights.items():
        in_layer = IN_LAYER.fullmatch(name)
        if not in_layer:
            module, _, end = name.rpartition(".")
            target = names.get(name) or (f"{names[FINAL_NORM]}.{end}" if module == FINAL_NORM else None)
            if target is None:
                unknown.append(name)
            else:
                state[target] = value
            continue
        layer, module, end = in_layer.groups()
        prefix = f"{names[LAYER]}.{layer}"
        if model.family == "llama" and module in LLAMA_FUSED:
            parts = split_heads(value, model) if "qkv" in module else value.chunk(2)
            state |= {f"{prefix}.{target}.{end}": part for target, part in zip(LLAMA_FUSED[module], parts, strict=True)}
        elif module in names:
            if module == "self_attention.linear_qkv":
                value = torch.cat(split_heads(value, model))
            state[f"{prefix}.{names[module]}.{end}"] = value.T if _is_transposed(module, end, model) else value
        else:
            unknown.append(name)
    return state, unknown


def from_transformers(weights: Mapping[str, Tensor], model: Gpt) -> dict[str, Tensor]:
    """Returns a Transformers model's `weights` as full Megatron weights: the inverse of `to_transformers`."""
    names = NAMES[model.family]
    full = {
        name: weights[names[name]]
        for name in (WORD_EMBEDDINGS, POSITION_EMBEDDINGS, OUTPUT)
        if names.get(name) in weights
    }
    if model.tied:
        full.pop(OUTPUT, None)
    ends = ("weight", "bias")
    get: Callable[[str], Tensor | None] = weights.get
    pairs = [(f"{FINAL_NORM}.{end}", get(f"{names[FINAL_NORM]}.{end}")) for end in ends]
    modules = [
        module for module in names if module not in (WORD_EMBEDDINGS, POSITION_EMBEDDINGS, OUTPUT, FINAL_NORM, LAYER)
    ]
    for layer in range(model.layers):
        prefix = f"{names[LAYER]}.{layer}"
        for end in ends:
            for module in modules:
                value = get(f"{prefix}.{names[module]}.{end}")
                if value is not None and _is_transposed(module, end, model):
                    value = value.T
                if value is not None and module == "self_attention.linear_qkv":
                    query, key, values = value.chunk(3)
                    value = join_heads(query, key, values, model)
                pairs.append((f"{LAYER}.{layer}.{module}.{end}", value))
            for module, targets in LLAMA_FUSED.items() if model.family == "llama" else ():
                parts = [part for part in (get(f"{prefix}.{target}.{end}") for target in targets) if part is not None]
                if len(parts) == len(targets):
                    value = join_heads(parts[0], parts[1], parts[2], model) if len(parts) == 3 else torch.cat(parts)
                    pairs.append((f"{LAYER}.{layer}.{module}.{end}", value))
    return full | {name: value for name, value in pairs if value is not None}


def _is_transposed(module: str, end: str, model: Gpt) -> bool:
    """Whether Transformers stores this matrix as input x output, as it does for GPT-2 (convolutions of width 1)."""
    return model.family == "gpt2" and end == "weight" and "linear" in module
