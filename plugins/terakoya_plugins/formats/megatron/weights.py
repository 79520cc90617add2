"""Megatron's GPT weights: what a model is by its arguments, and where each weight stands in Transformers.

Names are Megatron-Core's (`local` layers); `ALIASES` gives those of Transformer Engine's layers, Megatron-DeepSpeed has
its own for the same weights. Letters in shapes: N heads, G groups of query heads that share a key and a value, S head
size.
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

WORDS = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm"
LAYER = "decoder.layers"

ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}
"""Names inside a layer of Transformer Engine's, which fuses a norm with the matrix behind it."""

Family = Literal["llama", "gpt2"]
Rule = Literal["rows", "columns", "gated rows", "same"]


@dataclass(frozen=True)
class Gpt:
    """A GPT as Megatron builds it. `family` is the Transformers model it is; `biases` those of all linear layers."""

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


def rule(name: str, model: Gpt) -> Rule:
    """How tensor parallelism cuts the weight `name`: its first or second dimension, or not at all.

    `gated rows`: the two halves of the first dimension, gate and up, are cut each for itself.
    """
    if name in (WORDS, OUTPUT) or ".self_attention.linear_qkv." in name:
        return "rows"
    if ".mlp.linear_fc1." in name:
        return "gated rows" if model.family == "llama" else "rows"
    if name.endswith(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")):
        return "columns"
    return "same"


def join(parts: Sequence[Tensor], how: Rule) -> Tensor | None:
    """The whole weight of its `parts`, one a tensor-parallel rank; None where parts that should be one differ."""
    if how == "same":
        return parts[0] if all(torch.equal(part, parts[0]) for part in parts[1:]) else None
    if how == "gated rows":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(parts), 1 if how == "columns" else 0)


def cut(weight: Tensor, how: Rule, ranks: int) -> list[Tensor]:
    """The parts of `weight` for each tensor-parallel rank: what `join` puts together again."""
    if how == "same":
        return [weight] * ranks
    if how == "gated rows":
        gate, up = weight.chunk(2)
        return [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    return list(weight.chunk(ranks, 1 if how == "columns" else 0))


def split_heads(fused: Tensor, model: Gpt) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (N S, ...), keys (G S, ...) and values (G S, ...) of `fused` (G (N/G + 2) S, ...), group by group."""
    grouped = fused.reshape(model.groups, model.heads // model.groups + 2, model.head_size, *fused.shape[1:])
    return (
        grouped[:, :-2].reshape(-1, *fused.shape[1:]),
        grouped[:, -2].reshape(-1, *fused.shape[1:]),
        grouped[:, -1].reshape(-1, *fused.shape[1:]),
    )


def join_heads(query: Tensor, key: Tensor, value: Tensor, model: Gpt) -> Tensor:
    """What `split_heads` takes apart."""
    rest = query.shape[1:]
    parts = (part.reshape(model.groups, -1, model.head_size, *rest) for part in (query, key, value))
    return torch.cat(list(parts), 1).reshape(-1, *rest)


def strip(weights: Mapping[str, Tensor], vocabulary: int | None, source: Path) -> dict[str, Tensor]:
    """`weights` without the rows that pad the vocabulary; None keeps them.

    Raises:
        UserError: no embeddings, or fewer rows than `vocabulary`.
    """
    if WORDS not in weights:
        raise UserError(f"{source}: has no {WORDS}")
    rows = len(weights[WORDS])
    if vocabulary is not None and vocabulary > rows:
        raise UserError(
            f"{source}: holds {rows:,} pieces, fewer than the vocabulary's {vocabulary:,}; another tokenizer?"
        )
    if vocabulary is None:
        logger.warning(
            "%s: holds %s pieces, padding included; a tokenizer or vocab_size says how many are real",
            source,
            f"{rows:,}",
        )
        return dict(weights)
    return {name: value[:vocabulary] if name in (WORDS, OUTPUT) else value for name, value in weights.items()}


# ------------------------------------------------------------------------------------------- names in Transformers

NAMES: Mapping[Family, Mapping[str, str]] = {
    "llama": {
        WORDS: "model.embed_tokens.weight",
        FINAL_NORM: "model.norm",
        OUTPUT: "lm_head.weight",
        LAYER: "model.layers",
        "input_layernorm": "input_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc2": "mlp.down_proj",
    },
    "gpt2": {
        WORDS: "transformer.wte.weight",
        POSITIONS: "transformer.wpe.weight",
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
"""Megatron-Core's names and Transformers', of whole weights, of modules, and of what repeats."""

LLAMA_FUSED = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
}
"""What is one matrix in Megatron-Core and several in Llama."""

IN_LAYER = re.compile(re.escape(LAYER) + r"\.(\d+)\.(.+)\.(weight|bias)")


def to_transformers(weights: Mapping[str, Tensor], model: Gpt) -> tuple[dict[str, Tensor], list[str]]:
    """Transformers' weights of the whole Megatron `weights`, and the names among them that have no place there."""
    found: dict[str, Tensor] = {}
    unknown: list[str] = []
    names = NAMES[model.family]
    for name, value in weights.items():
        inside = IN_LAYER.fullmatch(name)
        if not inside:
            module, _, end = name.rpartition(".")
            target = names.get(name) or (f"{names[FINAL_NORM]}.{end}" if module == FINAL_NORM else None)
            if target is None:
                unknown.append(name)
            else:
                found[target] = value
            continue
        layer, module, end = inside.groups()
        prefix = f"{names[LAYER]}.{layer}"
        if model.family == "llama" and module in LLAMA_FUSED:
            parts = split_heads(value, model) if "qkv" in module else value.chunk(2)
            found |= {f"{prefix}.{target}.{end}": part for target, part in zip(LLAMA_FUSED[module], parts, strict=True)}
        elif module in names:
            if module == "self_attention.linear_qkv":
                value = torch.cat(split_heads(value, model))
            found[f"{prefix}.{names[module]}.{end}"] = value.T if _turned(module, end, model) else value
        else:
            unknown.append(name)
    return found, unknown


def from_transformers(weights: Mapping[str, Tensor], model: Gpt) -> dict[str, Tensor]:
    """The whole Megatron weights of a Transformers model's: the way back of `to_transformers`."""
    names = NAMES[model.family]
    found = {name: weights[names[name]] for name in (WORDS, POSITIONS, OUTPUT) if names.get(name) in weights}
    if model.tied:
        found.pop(OUTPUT, None)
    ends = ("weight", "bias")
    take: Callable[[str], Tensor | None] = weights.get
    pairs = [(f"{FINAL_NORM}.{end}", take(f"{names[FINAL_NORM]}.{end}")) for end in ends]
    modules = [module for module in names if module not in (WORDS, POSITIONS, OUTPUT, FINAL_NORM, LAYER)]
    for layer in range(model.layers):
        prefix = f"{names[LAYER]}.{layer}"
        for end in ends:
            for module in modules:
                value = take(f"{prefix}.{names[module]}.{end}")
                if value is not None and _turned(module, end, model):
                    value = value.T
                if value is not None and module == "self_attention.linear_qkv":
                    query, key, own = value.chunk(3)
                    value = join_heads(query, key, own, model)
                pairs.append((f"{LAYER}.{layer}.{module}.{end}", value))
            for module, targets in LLAMA_FUSED.items() if model.family == "llama" else ():
                parts = [part for part in (take(f"{prefix}.{target}.{end}") for target in targets) if part is not None]
                if len(parts) == len(targets):
                    value = join_heads(parts[0], parts[1], parts[2], model) if len(parts) == 3 else torch.cat(parts)
                    pairs.append((f"{LAYER}.{layer}.{module}.{end}", value))
    return found | {name: value for name, value in pairs if value is not None}


def _turned(module: str, end: str, model: Gpt) -> bool:
    """Whether Transformers holds this matrix as input x output: GPT-2's, which are convolutions of width 1."""
    return model.family == "gpt2" and end == "weight" and "linear" in module
