"""Megatron-LM's checkpoints (Megatron-Core models in the `torch` format), and its command lines.

`iter_0001000/mp_rank_TT_PPP/model_optim_rng.pt` holds what one tensor- and pipeline-parallel rank has; without pipeline
the folder is `mp_rank_TT`. A virtual pipeline's pieces are `model0`, `model1`, ... in one file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

from terakoya import hookimpl
from terakoya.components import ForeignParameters, Importer
from terakoya.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from terakoya_plugins.formats.megatron.weights import Gpt

LATEST = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")
"""With the optimizer in the same file, and beside the distributed optimizer's own."""

RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EMPTY = ("_extra_state", "rotary_pos_emb.inv_freq")
"""Endings of what holds no weight: Transformer Engine's notes on number formats, and what follows from the settings."""


class Megatron(Importer):
    """A Llama-like or GPT-2-like GPT, any tensor- and pipeline-parallel size.

    Attributes:
        vocab_size: pieces of the vocabulary; the rows above are padding and left out. Null keeps them all.
        define: NAME=VALUE: what shell variables hold, whatever a script assigns to them; for reading scripts.
    """

    vocab_size: PositiveInt | None = None
    define: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*=")], ...] = ()

    def read(self, source: Path, out: Path) -> None:
        """Reads `source`, a folder with iterations or one of them, and writes a Transformers folder to `out`.

        Raises:
            UserError: another format, a file is missing, a model that cannot be imported, weights without a place.
        """
        from terakoya.toolkit.formats import from_state_dict as foreign_model
        from terakoya_plugins.formats.megatron import arguments as _megatron_arguments
        from terakoya_plugins.formats.megatron import weights as _megatron_weights

        folder = find_iteration(source)
        ranks = read_ranks(folder)
        model = _megatron_arguments.describe(ranks[0, 0].get("args"), folder)
        whole = join_ranks(ranks, model, folder)
        found, unknown = _megatron_weights.to_transformers(
            _megatron_weights.strip(whole, self.vocab_size, folder), model
        )
        if unknown:
            raise UserError(f"{folder}: has weights that are not known: {foreign_model.listed(sorted(unknown))}")
        words = found[_megatron_weights.NAMES[model.family][_megatron_weights.WORDS]]
        kind, config = _megatron_arguments.configure(model, len(words))
        foreign_model.write(kind, config, found, folder, out)

    def parameters(self, file: Path) -> ForeignParameters:
        """The run that the shell script `file` starts with Megatron-LM's or Megatron-DeepSpeed's pretrain_gpt.py.

        Raises:
            UserError: the script cannot be read, or starts no such run.
        """
        from terakoya_plugins.formats.megatron import script_options as _megatron_options
        from terakoya_plugins.formats.megatron import script_parameters as _megatron_parameters
        from terakoya_plugins.formats.megatron import shell_script as _shell_script

        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}") from error
        defined = dict(each.split("=", 1) for each in self.define)
        commands = list(_shell_script.Script(file.parent, defined).commands(text))
        words, nodes = _megatron_options.find_command(commands, file)
        return _megatron_parameters.convert(words, nodes=nodes)


def find_iteration(source: Path) -> Path:
    """The folder with the ranks' folders: `source`, or the iteration that its tracker file names.

    Raises:
        UserError: there is none, or it holds Megatron's distributed format.
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
    """What each rank saved, by (pipeline, tensor) rank.

    Raises:
        UserError: a rank or its file is missing, one that cannot be read, or expert parallelism.
    """
    from terakoya.toolkit.formats import restricted_unpickler as pickled

    ranks: dict[tuple[int, int], Mapping[str, Any]] = {}
    for path in sorted(path for path in folder.iterdir() if path.name.startswith("mp_rank_")):
        match = RANK.fullmatch(path.name)
        if match is None:
            raise UserError(f"{path}: expected mp_rank_TT or mp_rank_TT_PPP; expert parallelism cannot be imported")
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if file is None:
            raise UserError(f"{path}: expected {' or '.join(FILES)}, found neither")
        content = pickled.load(file)
        if not isinstance(content, dict):
            raise UserError(f"{file}: expected a table of names, got {type(content).__name__}")
        ranks[int(match[2] or 0), int(match[1])] = content
    tensor, pipeline = (1 + max(key[place] for key in ranks) for place in (1, 0))
    arguments = ranks[min(ranks)].get("args")
    tensor = max(tensor, int(getattr(arguments, "tensor_model_parallel_size", 0) or 0))
    pipeline = max(pipeline, int(getattr(arguments, "pipeline_model_parallel_size", 0) or 0))
    lacking = [f"tensor {t} pipeline {p}" for p in range(pipeline) for t in range(tensor) if (p, t) not in ranks]
    if lacking:
        raise UserError(f"{folder}: of {tensor} x {pipeline} ranks lacks {', '.join(lacking[:8])}")
    return ranks


def join_ranks(ranks: Mapping[tuple[int, int], Mapping[str, Any]], model: Gpt, folder: Path) -> dict[str, Tensor]:
    """The whole weights by Megatron-Core's names, layers numbered from the first stage's first.

    Raises:
        UserError: ranks that hold different weights, or that differ where they should be one.
    """
    from terakoya_plugins.formats.megatron import weights

    stages, tensor = 1 + max(stage for stage, _ in ranks), 1 + max(rank for _, rank in ranks)
    chunks = sorted({key for content in ranks.values() for key in content if re.fullmatch(r"model\d*", key)})
    if not chunks:
        raise UserError(f"{folder}: holds no `model`; it holds {', '.join(sorted(map(str, ranks[0, 0])))}")
    whole: dict[str, Tensor] = {}
    first = 0
    for chunk in sorted(chunks, key=lambda name: int(name[5:] or 0)):
        for stage in range(stages):
            where = f"{folder}: pipeline rank {stage}, {chunk}"
            parts = [_weights_of(ranks[stage, rank].get(chunk), where) for rank in range(tensor)]
            layers = 0
            for name in parts[0]:
                if any(part.keys() != parts[0].keys() for part in parts):
                    raise UserError(f"{where}: the tensor-parallel ranks hold weights of different names")
                target, match = name, LAYER.fullmatch(name)
                if match:
                    layers = max(layers, int(match[1]) + 1)
                    end = weights.ALIASES.get(match[2], match[2])
                    target = f"{weights.LAYER}.{first + int(match[1])}.{end}"
                joined = weights.join([part[name] for part in parts], weights.rule(target, model))
                if joined is None:
                    raise UserError(f"{where}: {name} differs between tensor-parallel ranks, and should be one")
                if target == weights.OUTPUT and model.tied:
                    _check_tied(whole, joined, where)
                else:
                    whole[target] = joined
            first += layers
    return whole


def _check_tied(whole: Mapping[str, Tensor], output: Tensor, where: str) -> None:
    """The last stage's copy of the embeddings is one. UserError otherwise."""
    import torch

    from terakoya_plugins.formats.megatron.weights import WORDS

    if WORDS in whole and not torch.equal(whole[WORDS], output):
        raise UserError(
            f"{where}: output_layer.weight is tied to the embeddings by the arguments, but differs from them"
        )


def _weights_of(content: Any, where: str) -> dict[str, Tensor]:
    """The tensors of one rank's model, by name; what holds no weight is left out.

    Raises:
        UserError: not a table of tensors, or the model from before Megatron-Core.
    """
    import torch

    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a table of weights, got {type(content).__name__}")
    if "language_model" in content:
        raise UserError(
            f"{where}: is a model from before Megatron-Core; convert it with Megatron-LM's tools/checkpoint"
        )
    found: dict[str, Tensor] = {}
    other: defaultdict[str, int] = defaultdict(int)
    for name, value in content.items():
        name = name.removeprefix("module.")
        if name.endswith(EMPTY):
            continue
        if isinstance(value, torch.Tensor):
            found[name] = value
        else:
            other[name] += 1
    if other:
        raise UserError(f"{where}: {', '.join(sorted(other)[:5])}: expected tensors")
    return found


@hookimpl
def register_importers() -> dict[str, type[Importer]]:
    """Offers `megatron`."""
    return {"megatron": Megatron}
