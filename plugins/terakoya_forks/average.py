"""Averages the weights of models of one architecture: of the last checkpoints of a run, or of several runs.

The mean of models that one trunk ends in is often better than each ("model soups", Wortsman et al., 2022,
arXiv:2203.05482; "latest weight averaging", Kaddour, 2022, arXiv:2209.14981).

Weights are read, added up in float64 and written one tensor at a time, as the header of the first model's safetensors
file lays them out: memory holds one tensor, whatever the number of models.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from terakoya.atomic_files import check_new_folder, dump_hashed_json, new_folder, scratch_folder
from terakoya.components.tokenizer import load_tokenizer
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, kind_of, list_models
from terakoya.runs.checkpoints import find_problems, list_checkpoints, read_manifest, while_kept
from terakoya.runs.finding import find_checkpoint
from terakoya.store.tokenizer_identity import describe_different_ids, vocabulary_files
from terakoya.toolkit.formats import folder_digests, model_files

log = logging.getLogger("terakoya")
RECORD = "average.json"
"""The file of the new folder that says what it is the average of, under a hash."""
NOT_COPIED = (*model_files.WEIGHTS, "*.bin", *model_files.ABOUT_ONE_MODEL)
"""Patterns of files of the first model that are not those of the average: all others are copied."""
NOT_COMPARED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "use_cache")
"""Keys of config.json that say nothing about the weights; dropout is another."""
SHOWN = 5


@dataclass(frozen=True)
class Averaged:
    """A model of an average: the folder or checkpoint, its step, and its share of the sum, all of which add up to 1."""

    folder: str
    step: int | None
    share: float


def average(
    sources: Sequence[Path], out: Path, *, weights: Sequence[float] | None = None, last: int | None = None
) -> list[Averaged]:
    """Writes the model whose weights are the mean of those of `sources` into the new Transformers folder `out`; returns
    what was averaged, in order.

    Args:
        sources: RUN for its newest whole checkpoint, RUN@STEP, the folder of a checkpoint, or a Transformers folder.
        weights: how much each counts, in the order of `sources`; None counts all alike.
        last: of each source, which is a run then, the newest `last` whole checkpoints.

    Raises:
        UserError: fewer than two models, models of another architecture or vocabulary, a folder that is damaged or has
            no safetensors weights, weights that do not fit, or `out` already exists.
        TemporaryFailure: a run removed its checkpoint while it was read.
    """
    check_new_folder(out)
    sources = [each for source in sources for each in _last_checkpoints(source, last)] if last else list(sources)
    if len(sources) < 2:
        raise UserError("expected at least two models to average, got one; name more, or give --last 5 for a run")
    shares = _shares(weights, len(sources))
    found = [source if kind_of(source) == "Transformers model" else find_checkpoint(source) for source in sources]
    # what is temporary is gone before the model gets its name: a process that is killed after that leaves nothing
    with new_folder(out) as draft, ExitStack() as reading, scratch_folder(out) as scratch:
        for folder in found:
            reading.enter_context(while_kept(folder))
        folders, steps = [], []
        for number, source in enumerate(found):
            folder, step = _as_transformers_folder(source, scratch / str(number), first=number == 0)
            folders.append(folder)
            steps.append(step)
        names = list_models(folders[0])
        for source, folder in zip(sources[1:], folders[1:], strict=True):
            _check_same(sources[0], folders[0], source, folder, names)
        averaged = [
            Averaged(str(source), step, share) for source, step, share in zip(sources, steps, shares, strict=True)
        ]
        for name in names:
            (draft / name).mkdir(exist_ok=True)
            _write_model([folder / name for folder in folders], shares, draft / name, sources)
            (draft / name / RECORD).write_bytes(dump_hashed_json({"models": [vars(each) for each in averaged]}))
            folder_digests.write(draft / name)
    return averaged


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    """Returns the share of each model; raises UserError where `weights` are not as many positive numbers."""
    if weights is None:
        return [1.0 / count] * count
    if len(weights) != count:
        raise UserError(f"--weights: expected {count} numbers, one for each model, got {len(weights)}")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"--weights: expected positive numbers, got {', '.join(f'{weight:g}' for weight in weights)}")
    return [weight / math.fsum(weights) for weight in weights]


def _last_checkpoints(run: Path, last: int) -> list[Path]:
    """Returns the folders of the newest `last` whole checkpoints of `run`, oldest first; warns about damaged ones."""
    if kind_of(run) != "run":
        raise UserError(f"{run}: --last takes checkpoints of a run, got {describe_found(run, 'run')}")
    found: list[Path] = []
    for _, folder in reversed(list_checkpoints(run / "checkpoints")):
        if len(found) == last:
            break
        if problems := find_problems(folder):
            log.warning("%s: damaged: %s; it is left out", folder, "; ".join(problems[:SHOWN]))
        else:
            found.insert(0, folder)
    if len(found) < last:
        raise UserError(
            f"{run}: expected {last} whole checkpoints for --last, found {len(found)}; a run keeps as many as its "
            "checkpoint.keep"
        )
    return found


# ------------------------------------------------------------------------------------------------ models as folders


def _as_transformers_folder(source: Path, temporary: Path, *, first: bool) -> tuple[Path, int | None]:
    """Returns a Transformers folder with the models of `source`, a checkpoint or such a folder, and the checkpoint's
    step.

    Of a checkpoint other than the `first` its `model/` is taken where it has one, together with the tokenizer that is
    next to it; otherwise it is exported to `temporary`.
    """
    if kind_of(source) == "Transformers model":
        for name in list_models(source):
            folder_digests.check(source / name)
        return source, None
    step: int = read_manifest(source)["step"]
    if not first and (source / "model").is_dir():
        return source / "model", step
    export(source, temporary)
    return temporary, step


def _check_same(first: Path, ours: Path, other: Path, theirs: Path, names: Sequence[str]) -> None:
    """Raises UserError unless the folder `theirs`, of the source `other`, has models of the same architecture with the
    same vocabulary as `ours`, of `first`."""
    if (found := list_models(theirs)) != names:
        raise UserError(f"{other}: has other models than {first}: {_list(found)} instead of {_list(names)}")
    for name in names:
        one, two = (_config(folder / name) for folder in (ours, theirs))
        changed = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
        if changed:
            shown = "; ".join(f"{key} {two.get(key)} instead of {one.get(key)}" for key in changed[:SHOWN])
            raise UserError(f"{other}: is of another architecture than {first}: {shown}; average models of one kind")
    tokenizers = [_tokenizer(folder) for folder in (ours, theirs)]
    if vocabulary_files(tokenizers[0]) == vocabulary_files(tokenizers[1]):
        return
    mine, its = (load_tokenizer(folder).get_vocab() for folder in tokenizers)
    if mine != its:
        reason = describe_different_ids(mine, its, first, other)
        raise UserError(f"{other}: has another vocabulary than {first} ({reason}); average models of one tokenizer")


def _list(names: Sequence[str]) -> str:
    return ", ".join(name or "one without a name" for name in names) or "none"


def _config(folder: Path) -> dict[str, Any]:
    """Returns what config.json says about the weights of the model in `folder`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ignored = (*NOT_COMPARED, *(key for key in config if "dropout" in key or key.endswith("_token_id")))
    return {key: value for key, value in config.items() if key not in ignored}


def _tokenizer(folder: Path) -> Path:
    """Returns the folder of the tokenizer of the models in `folder`: it is with each, or next to a checkpoint's."""
    beside = folder.parent / "tokenizer"
    return beside if folder.name == "model" and beside.is_dir() else folder / list_models(folder)[0]


# ---------------------------------------------------------------------------------------------------- weights


def _write_model(folders: Sequence[Path], shares: Sequence[float], out: Path, sources: Sequence[Path]) -> None:
    """Writes the average of the models in `folders` into `out`, with the other files of the first."""
    files = sorted(each.name for each in folders[0].glob("*.safetensors"))
    if not files:
        raise UserError(f"{sources[0]}: has no safetensors weights; export it first")
    for file in sorted(folders[0].iterdir()):
        is_index = file.name == "model.safetensors.index.json"
        if file.is_file() and (is_index or not model_files.matches(file, NOT_COPIED)):
            shutil.copyfile(file, out / file.name)
    with ExitStack() as stack:
        readers = [_Weights(folder, source, stack) for folder, source in zip(folders, sources, strict=True)]
        for reader in readers[1:]:
            reader.check_same(readers[0])
        for name in files:
            _write_file(folders[0] / name, out / name, readers, shares)


class _Weights:
    """The tensors in the safetensors files of a folder, read one at a time; `stack` closes the files."""

    def __init__(self, folder: Path, source: Path, stack: ExitStack) -> None:
        self.source = source
        self.files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, "pt"))
            self.files.update(dict.fromkeys(file.keys(), file))

    def __call__(self, name: str) -> Tensor:
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def check_same(self, first: _Weights) -> None:
        """Raises UserError unless names and shapes are those of `first`."""
        if others := sorted(self.files.keys() ^ first.files.keys()):
            where = self if others[0] in self.files else first
            raise UserError(
                f"{self.source}: has other tensors than {first.source}: only {where.source} has "
                f"{', '.join(others[:SHOWN])}; average models of one kind"
            )
        for name in sorted(self.files):
            if self.shape(name) != first.shape(name):
                raise UserError(
                    f"{self.source}: {name} has the shape {list(self.shape(name))}, in {first.source} "
                    f"{list(first.shape(name))}; average models of one kind"
                )


def _write_file(first: Path, out: Path, readers: Sequence[_Weights], shares: Sequence[float]) -> None:
    """Writes the averages of the tensors in the safetensors file `first`, in its layout, as the file `out`."""
    with first.open("rb") as source:
        length = source.read(8)
        header = source.read(struct.unpack("<Q", length)[0])
    layout: Mapping[str, Any] = json.loads(header)
    names = sorted((name for name in layout if name != "__metadata__"), key=lambda name: layout[name]["data_offsets"])
    with out.open("wb") as target:
        target.write(length + header)
        for name in names:
            mean = _mean(name, readers, shares).contiguous()
            target.write(mean.reshape(-1).view(torch.uint8).numpy().data)


def _mean(name: str, readers: Sequence[_Weights], shares: Sequence[float]) -> Tensor:
    """Returns the weighted mean of the tensors `name`, added up in float64, in the first one's shape and dtype. Raises
    UserError if numbers that are no weights differ, or the mean is not finite."""
    first = readers[0](name)
    if not first.is_floating_point():
        for reader in readers[1:]:
            if not torch.equal(reader(name), first):
                raise UserError(
                    f"{reader.source}: {name} is {str(first.dtype).removeprefix('torch.')} and differs from "
                    f"{readers[0].source}: only weights have a mean"
                )
        return first
    total = first.double() * shares[0]
    for reader, share in zip(readers[1:], shares[1:], strict=True):
        total += reader(name).double() * share
    mean = total.to(first.dtype)
    if not bool(torch.isfinite(mean).all()):
        raise UserError(f"{name}: a weight is not finite; `terakoya verify` says of which model")
    return mean
