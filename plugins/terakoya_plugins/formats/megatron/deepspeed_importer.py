"""Megatron-DeepSpeed's pipeline checkpoints: `global_step1000/layer_LL-model_TT-model_states.pt`.

Each file holds one layer's weights of one tensor-parallel rank, whatever the pipeline was; `mp_rank_00_model_states.pt`
holds the arguments. The files are there for runs without `--no-pipeline-parallel`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Importer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from terakoya_plugins.formats.megatron.weights import Gpt

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
"""Modules of a layer, here and in Megatron-Core."""

OTHER_NAMES = {
    "word_embeddings.weight": "embedding.word_embeddings.weight",
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "weight": "decoder.final_layernorm.weight",
    "bias": "decoder.final_layernorm.bias",
    "final_layernorm.weight": "decoder.final_layernorm.weight",
    "final_layernorm.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
}
"""What stands outside the layers. The norm at the end is a file of its own, with nothing but `weight` and `bias`."""


class MegatronDeepSpeed(Importer):
    """A GPT-2-like or Llama-like GPT, any tensor- and pipeline-parallel size.

    Attributes:
        vocab_size: pieces of the vocabulary; the rows above are padding and left out. Null keeps them all.
        checkpoint_version: tells the order of queries, keys and values; null takes what the checkpoint says.
    """

    vocab_size: PositiveInt | None = None
    checkpoint_version: NonNegativeFloat | None = None

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, a `global_step` folder or one above it with `latest`, and writes a Transformers folder.

        Raises:
            UserError: no layer files, a rank is missing, a model that cannot be imported, a weight without a place.
        """
        from terakoya.toolkit.formats import from_state_dict as foreign_model
        from terakoya.toolkit.formats import restricted_unpickler as pickled
        from terakoya_plugins.formats.megatron import arguments as _megatron_arguments
        from terakoya_plugins.formats.megatron import weights as _megatron_weights

        folder = find_step(source)
        head = pickled.load(folder / ARGUMENTS)
        arguments = head.get("args") if isinstance(head, dict) else None
        model = _megatron_arguments.describe(arguments, folder / ARGUMENTS)
        version = head.get("checkpoint_version") if self.checkpoint_version is None else self.checkpoint_version
        if version is None:
            raise UserError(
                f"{folder / ARGUMENTS}: holds no checkpoint_version, which tells the order of queries, keys and "
                "values; say it (--checkpoint-version 3; 0 and 1 are Megatron-LM's before 2021)"
            )
        whole = read_layers(folder, model, version=float(version))
        found, unknown = _megatron_weights.to_transformers(
            _megatron_weights.strip(whole, self.vocab_size, folder), model
        )
        if unknown:
            raise UserError(f"{folder}: has weights that are not known: {foreign_model.listed(sorted(unknown))}")
        words = found[_megatron_weights.NAMES[model.family][_megatron_weights.WORDS]]
        kind, config = _megatron_arguments.configure(model, len(words))
        foreign_model.write(kind, config, found, folder, out)


def find_step(source: Path) -> Path:
    """The folder with the layers' files: `source`, or the one that its `latest` names.

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
    """The whole weights by Megatron-Core's names, joined over tensor-parallel ranks.

    Raises:
        UserError: a rank's file is missing, ranks that differ where they should be one, a weight that is not known.
    """
    from terakoya.toolkit.formats import restricted_unpickler as pickled
    from terakoya_plugins.formats.megatron import weights

    files: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := FILE.fullmatch(path.name):
            files.setdefault(int(match[1]), {})[int(match[2])] = path
    ranks = 1 + max(rank for by_rank in files.values() for rank in by_rank)
    whole: dict[str, Tensor] = {}
    layer = 0
    for _, by_rank in sorted(files.items()):
        lacking = [rank for rank in range(ranks) if rank not in by_rank]
        if lacking:
            raise UserError(f"{by_rank[min(by_rank)]}: the same of tensor-parallel rank {lacking[0]} is missing")
        parts = [_tensors(pickled.load(by_rank[rank]), by_rank[rank]) for rank in range(ranks)]
        is_layer = any(name.startswith("self_attention.") for name in parts[0])
        for name in parts[0]:
            target = _target(name, layer if is_layer else None, by_rank[0])
            if any(name not in part for part in parts):
                raise UserError(f"{by_rank[0]}: {name} is not in every tensor-parallel rank's file")
            pieces = [part[name] for part in parts]
            if ".linear_qkv." in target:
                pieces = [_in_order(piece, model, version, ranks, by_rank[0]) for piece in pieces]
            joined = weights.join(pieces, weights.rule(target, model))
            if joined is None or (target in whole and not whole[target].equal(joined)):
                raise UserError(f"{by_rank[0]}: {name} should be one weight, but differs between files")
            whole[target] = joined
        layer += is_layer
    return whole


def _in_order(fused: Tensor, model: Gpt, version: float, ranks: int, file: Path) -> Tensor:
    from terakoya_plugins.formats.megatron.ordering import modern

    if version < 2 and model.groups != model.heads:
        raise UserError(f"{file}: grouped queries in checkpoint version {version}, which did not have them")
    return modern(fused, version=version, heads=model.heads // ranks, head_size=model.head_size)


def _target(name: str, layer: int | None, file: Path) -> str:
    """Megatron-Core's name of the weight `name`, in the layer with this number or outside the layers.

    Raises:
        UserError: it is not known.
    """
    module, _, end = name.rpartition(".")
    if layer is not None and module in LAYER_NAMES:
        return f"decoder.layers.{layer}.{LAYER_NAMES[module]}.{end}"
    if layer is None and name in OTHER_NAMES:
        return OTHER_NAMES[name]
    expert = "; a mixture of experts cannot be imported" if "moe" in name or "expert" in name else ""
    raise UserError(f"{file}: {name}: not known{expert}")


def _tensors(content: Any, file: Path) -> Mapping[str, Tensor]:
    """The tensors of a layer's file. UserError if it holds anything else, Transformer Engine's notes apart."""
    import torch

    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a table of weights, got {type(content).__name__}")
    kept = {name: value for name, value in content.items() if not name.endswith(("_extra_state", "inv_freq"))}
    wrong = [name for name, value in kept.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise UserError(f"{file}: {wrong[0]}: expected a tensor")
    return kept


@hookimpl
def register_importers() -> dict[str, type[Importer]]:
    """Offers `megatron_deepspeed`."""
    return {"megatron_deepspeed": MegatronDeepSpeed}
