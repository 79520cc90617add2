"""Imports Megatron-LM's checkpoints (Megatron-Core models in the `torch` format) and its launch scripts.

`iter_0001000/mp_rank_TT_PPP/model_optim_rng.pt` contains the weights of one tensor- and pipeline-parallel rank; without
pipeline parallelism the folder is `mp_rank_TT`. The stages of a virtual pipeline are `model0`, `model1`, ... in a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

from terakoya.components import Importer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from terakoya_megatron.converted_config import ConvertedConfig
    from terakoya_megatron.weights import Gpt

LATEST = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")
"""Names of a rank's file: with the optimizer in it, and with a distributed optimizer in another file."""

RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
NOT_WEIGHTS = ("_extra_state", "rotary_pos_emb.inv_freq")
"""Endings of names that are not weights: Transformer Engine's state for number formats, and computed frequencies."""


class MegatronImporter(Importer):
    """A GPT like Llama or GPT-2, of any tensor- and pipeline-parallel size."""

    vocab_size: PositiveInt | None = None
    """The size of the vocabulary; further embedding rows are padding and are removed. Null keeps all rows. Unit:
    tokens."""
    define: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*=")], ...] = ()
    """NAME=VALUE: values of shell variables, which replace those that a launch script assigns."""

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, a folder with iterations or one of them."""
        from terakoya_megatron import arguments

        folder = find_iteration(source)
        ranks = read_ranks(folder)
        model = arguments.read_model(ranks[0, 0].get("args"), folder)
        arguments.write_transformers(join_ranks(ranks, model, folder), model, self.vocab_size, folder, out)

    def parameters(self, file: Path) -> ConvertedConfig:
        """Converts the run that a shell script starts with pretrain_gpt.py of Megatron-LM or Megatron-DeepSpeed.

        Raises:
            UserError: the script cannot be read, or starts no such run.
        """
        from terakoya_megatron import script_options, script_parameters, shell_script

        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error
        defined = dict(definition.split("=", 1) for definition in self.define)
        commands = list(shell_script.Script(file.parent, defined).commands(text))
        program, words, nodes = script_options.find_command(commands, file)
        converted = script_parameters.convert(words, nodes=nodes)
        if "gpt" in program.rpartition("/")[2]:
            return converted
        note = f"{program} is no pretrain_gpt.py: the parameters describe a causal language model"
        return replace(converted, notes=[*converted.notes, note])


def find_iteration(source: Path) -> Path:
    """Returns the folder with the ranks' folders: `source`, or the iteration that its tracker file names.

    Raises:
        UserError: there is none, or it is in Megatron's distributed format.
    """
    folder, tracker = source, source / LATEST
    if tracker.is_file():
        name = tracker.read_text(encoding="utf-8").strip()
        folder = source / ("release" if name == "release" else f"iter_{int(name):07d}" if name.isdecimal() else name)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder" + (f"; {tracker} names it" if folder != source else ""))
    if any((folder / name).exists() for name in (".metadata", "metadata.json", "common.pt")):
        raise UserError(
            f"{folder}: is in Megatron's distributed format; save it as `torch` first (--ckpt-convert-format torch "
            "--ckpt-convert-save DIR in Megatron-LM), and import that"
        )
    if not any(RANK.fullmatch(path.name) for path in folder.iterdir()):
        raise UserError(f"{source}: expected a folder with {LATEST} or with mp_rank_00 folders, found neither")
    return folder


def read_ranks(folder: Path) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Returns the content of each rank's file, by (pipeline, tensor) rank.

    Raises:
        UserError: a rank or its file is missing, a file cannot be read, or the model uses expert parallelism.
    """
    from terakoya.toolkit.formats import restricted_unpickler

    ranks: dict[tuple[int, int], Mapping[str, Any]] = {}
    for path in sorted(path for path in folder.iterdir() if path.name.startswith("mp_rank_")):
        match = RANK.fullmatch(path.name)
        if match is None:
            raise UserError(f"{path}: expected mp_rank_TT or mp_rank_TT_PPP; expert parallelism cannot be imported")
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if file is None:
            raise UserError(f"{path}: expected {' or '.join(FILES)}, found neither")
        content = restricted_unpickler.load(file)
        if not isinstance(content, dict):
            raise UserError(f"{file}: expected a dict, got {type(content).__name__}")
        ranks[int(match[2] or 0), int(match[1])] = content
    tensor, pipeline = (1 + max(key[index] for key in ranks) for index in (1, 0))
    arguments = ranks[min(ranks)].get("args")
    tensor = max(tensor, int(getattr(arguments, "tensor_model_parallel_size", 0) or 0))
    pipeline = max(pipeline, int(getattr(arguments, "pipeline_model_parallel_size", 0) or 0))
    missing = [f"tensor {t} pipeline {p}" for p in range(pipeline) for t in range(tensor) if (p, t) not in ranks]
    if missing:
        raise UserError(f"{folder}: of {tensor} x {pipeline} ranks, these are missing: {', '.join(missing[:8])}")
    return ranks


def join_ranks(ranks: Mapping[tuple[int, int], Mapping[str, Any]], model: Gpt, folder: Path) -> dict[str, Tensor]:
    """Returns the full weights under Megatron-Core's names; layers are numbered through all stages.

    Raises:
        UserError: ranks have weights of different names, or differ in a weight that they should share.
    """
    from terakoya_megatron import weights

    stages, tensor = 1 + max(stage for stage, _ in ranks), 1 + max(rank for _, rank in ranks)
    chunks = sorted({key for content in ranks.values() for key in content if re.fullmatch(r"model\d*", key)})
    if not chunks:
        raise UserError(f"{folder}: has no `model`; it has {', '.join(sorted(map(str, ranks[0, 0])))}")
    full: dict[str, Tensor] = {}
    first_layer = 0
    for chunk in sorted(chunks, key=lambda name: int(name[5:] or 0)):
        for stage in range(stages):
            where = f"{folder}: pipeline rank {stage}, {chunk}"
            contents = [_read_tensors(ranks[stage, rank].get(chunk), where) for rank in range(tensor)]
            layers = 0
            for name in contents[0]:
                if any(content.keys() != contents[0].keys() for content in contents):
                    raise UserError(f"{where}: the tensor-parallel ranks have weights of different names")
                target, match = name, LAYER.fullmatch(name)
                if match:
                    layers = max(layers, int(match[1]) + 1)
                    end = weights.ALIASES.get(match[2], match[2])
                    target = f"{weights.LAYER}.{first_layer + int(match[1])}.{end}"
                shards = [content[name] for content in contents]
                joined = weights.join_shards(shards, weights.split_rule(target, model))
                if joined is None:
                    raise UserError(f"{where}: {name} should be the same on all tensor-parallel ranks, but differs")
                if target == weights.OUTPUT and model.tied:
                    _check_tied(full, joined, where)
                else:
                    full[target] = joined
            first_layer += layers
    return full


def _check_tied(full: Mapping[str, Tensor], output: Tensor, where: str) -> None:
    import torch

    from terakoya_megatron.weights import WORD_EMBEDDINGS

    if WORD_EMBEDDINGS in full and not torch.equal(full[WORD_EMBEDDINGS], output):
        raise UserError(
            f"{where}: output_layer.weight is tied to the embeddings by the arguments, but differs from them"
        )


def _read_tensors(content: Any, where: str) -> dict[str, Tensor]:
    import torch

    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a dict of weights, got {type(content).__name__}")
    if "language_model" in content:
        raise UserError(
            f"{where}: is a model from before Megatron-Core; convert it with Megatron-LM's tools/checkpoint"
        )
    tensors: dict[str, Tensor] = {}
    invalid = []
    for name, value in content.items():
        name = name.removeprefix("module.")
        if name.endswith(NOT_WEIGHTS):
            continue
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            invalid.append(name)
    if invalid:
        raise UserError(f"{where}: {', '.join(sorted(set(invalid))[:5])}: expected tensors")
    return tensors
