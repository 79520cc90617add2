"""Imports Megatron-DeepSpeed's pipeline checkpoints: `global_step1000/layer_LL-model_TT-model_states.pt`.

Each file contains the weights of one layer and one tensor-parallel rank, for any pipeline size.
`mp_rank_00_model_states.pt` contains the arguments. Runs with `--no-pipeline-parallel` do not write the layers' files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeFloat, PositiveInt

from terakoya.components import Importer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from terakoya_megatron.weights import Gpt

FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
ARGUMENTS = "mp_rank_00_model_states.pt"

LAYER_NAMES = {
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    "input_layernorm": "input_layernorm",
}
"""Module of a layer in Megatron-DeepSpeed -> in Megatron-Core."""

OTHER_NAMES = {
    "word_embeddings.weight": "embedding.word_embeddings.weight",
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "weight": "decoder.final_layernorm.weight",
    "bias": "decoder.final_layernorm.bias",
    "final_layernorm.weight": "decoder.final_layernorm.weight",
    "final_layernorm.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
}
"""Weight outside the layers -> its name in Megatron-Core. The final norm's file contains only `weight` and `bias`."""


class MegatronDeepSpeed(Importer):
    """A GPT like GPT-2 or Llama, of any tensor- and pipeline-parallel size."""

    vocab_size: PositiveInt | None = None
    """The size of the vocabulary; further embedding rows are padding and are removed. Null keeps all rows. Unit:
    tokens."""
    checkpoint_version: NonNegativeFloat | None = None
    """The version that decides the order of queries, keys and values; null is the version in the checkpoint."""

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, a `global_step` folder or its parent with a file `latest`."""
        from terakoya.toolkit.formats import restricted_unpickler
        from terakoya_megatron import arguments

        folder = find_step_folder(source)
        content = restricted_unpickler.load(folder / ARGUMENTS)
        args = content.get("args") if isinstance(content, dict) else None
        model = arguments.read_model(args, folder / ARGUMENTS)
        version = content.get("checkpoint_version") if self.checkpoint_version is None else self.checkpoint_version
        if version is None:
            raise UserError(
                f"{folder / ARGUMENTS}: has no checkpoint_version, which decides the order of queries, keys and "
                "values; set it (--checkpoint-version 3; 0 and 1 are Megatron-LM's before 2021)"
            )
        weights = read_layers(folder, model, version=float(version))
        arguments.write_transformers(weights, model, self.vocab_size, folder, out)


def find_step_folder(source: Path) -> Path:
    """Returns the folder with the layers' files: `source`, or the folder that the file `latest` in it names.

    Raises:
        UserError: there is none.
    """
    folder, latest = source, source / "latest"
    if latest.is_file():
        folder = source / latest.read_text(encoding="utf-8").strip()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not any(FILE.fullmatch(path.name) for path in folder.iterdir()):
        raise UserError(
            f"{folder}: expected files layer_LL-model_TT-model_states.pt, found none; a run with "
            "--no-pipeline-parallel writes none"
        )
    return folder


def read_layers(folder: Path, model: Gpt, *, version: float) -> dict[str, Tensor]:
    """Returns the full weights under Megatron-Core's names, joined over tensor-parallel ranks.

    Raises:
        UserError: a missing file of a rank, ranks that differ in a weight they should share, or an unknown weight.
    """
    from terakoya.toolkit.formats import restricted_unpickler
    from terakoya_megatron import weights

    files: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := FILE.fullmatch(path.name):
            files.setdefault(int(match[1]), {})[int(match[2])] = path
    ranks = 1 + max(rank for by_rank in files.values() for rank in by_rank)
    full: dict[str, Tensor] = {}
    layer = 0
    for _, by_rank in sorted(files.items()):
        missing = [rank for rank in range(ranks) if rank not in by_rank]
        if missing:
            raise UserError(f"{by_rank[min(by_rank)]}: the file of tensor-parallel rank {missing[0]} is missing")
        contents = [_check_tensors(restricted_unpickler.load(by_rank[rank]), by_rank[rank]) for rank in range(ranks)]
        is_layer = any(name.startswith("self_attention.") for name in contents[0])
        for name in contents[0]:
            target = _core_name(name, layer if is_layer else None, by_rank[0])
            if any(name not in content for content in contents):
                raise UserError(f"{by_rank[0]}: {name} is not in every tensor-parallel rank's file")
            shards = [content[name] for content in contents]
            if ".linear_qkv." in target:
                shards = [_reorder_qkv(shard, model, version, ranks, by_rank[0]) for shard in shards]
            joined = weights.join_shards(shards, weights.split_rule(target, model))
            if joined is None or (target in full and not full[target].equal(joined)):
                raise UserError(f"{by_rank[0]}: {name} should be the same in all files, but differs")
            full[target] = joined
        layer += is_layer
    return full


def _reorder_qkv(fused: Tensor, model: Gpt, version: float, ranks: int, file: Path) -> Tensor:
    """Returns a rank's fused queries, keys and values (3 N S, ...), of N heads of size S, in the order of version 2 and
    later: per head its query, key and value. Raises UserError if grouped.

    Version 0 has all queries, then all keys, then all values; version 1 interleaves the three within each head.
    """
    if version >= 2:
        return fused
    if model.groups != model.heads:
        raise UserError(f"{file}: grouped queries in checkpoint version {version}, which does not support them")
    heads, rest = model.heads // ranks, fused.shape[1:]
    if version >= 1:
        return fused.reshape(heads, model.head_size, 3, *rest).transpose(1, 2).reshape(-1, *rest)
    return fused.reshape(3, heads, model.head_size, *rest).transpose(0, 1).reshape(-1, *rest)


def _core_name(name: str, layer: int | None, file: Path) -> str:
    """Returns Megatron-Core's name of the weight `name`, which is in layer `layer` or, if None, outside the layers."""
    module, _, end = name.rpartition(".")
    if layer is not None and module in LAYER_NAMES:
        return f"decoder.layers.{layer}.{LAYER_NAMES[module]}.{end}"
    if layer is None and name in OTHER_NAMES:
        return OTHER_NAMES[name]
    expert = "; a mixture of experts cannot be imported" if "moe" in name or "expert" in name else ""
    raise UserError(f"{file}: {name}: unknown weight{expert}")


def _check_tensors(content: Any, file: Path) -> Mapping[str, Tensor]:
    """Returns the weights of a layer's file, without Transformer Engine's extra state and computed frequencies."""
    import torch

    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a dict of weights, got {type(content).__name__}")
    tensors = {name: value for name, value in content.items() if not name.endswith(("_extra_state", "inv_freq"))}
    invalid = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if invalid:
        raise UserError(f"{file}: {invalid[0]}: expected a tensor")
    return tensors
