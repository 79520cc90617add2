"""The tensors of event plugins in a checkpoint:

    events/NAME.safetensors          those of the plugin NAME that rank 0 writes, if the plugin keeps any on some rank
           NAME-RANK.safetensors     those of another rank

The files are those of `state/`: tensors, whole or in shards that many processes wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from terakoya.atomic_files import FileFacts
from terakoya.components import EventListener, TensorShard
from terakoya.components.event import SavedTensors
from terakoya.errors import UserError
from terakoya.runs.checkpoints import read_manifest
from terakoya.training.checkpoint.state import StoredTensors, write_file
from terakoya.training.engines.tensor_shards import whole_shard
from terakoya.training.model.module_parts import saved_values

FOLDER = "events"
ENDING = ".safetensors"
FILE = re.compile(rf"{FOLDER}/(?P<plugin>.+?)(-\d{{5}})?{re.escape(ENDING)}")

EventTensors = Mapping[str, Sequence[TensorShard]]
"""Event plugin -> what this process has of its tensors."""


def keeps_tensors(listener: EventListener) -> bool:
    """Whether `listener` has tensors in checkpoints, on some rank."""
    kind = type(listener)
    return kind.tensors is not EventListener.tensors or kind.shards is not EventListener.shards


def collect(listeners: Mapping[str, EventListener], rank: int) -> EventTensors:
    """Returns what the `listeners` of `rank`, by plugin, keep in tensors."""
    return {
        name: [*starmap(whole_shard, each.tensors().items() if rank == 0 else ()), *each.shards()]
        for name, each in listeners.items()
        if keeps_tensors(each)
    }


def write(folder: Path, rank: int, tensors: EventTensors) -> dict[str, dict[str, Any]]:
    """Writes the `tensors` of `rank` into the checkpoint `folder`, which has no manifest yet, and flushes them to disk.
    Returns name -> size and SHA-256 of each file. Raises OSError."""
    written = {}
    for plugin, shards in tensors.items():
        if rank and not shards:
            continue
        (folder / FOLDER).mkdir(exist_ok=True)
        name = f"{FOLDER}/{plugin}{f'-{rank:05d}' if rank else ''}{ENDING}"
        write_file(folder / name, shards)
        written[name] = FileFacts.of(folder / name, sync=True).model_dump()
    return written


def check_whole(folder: Path, names: Iterable[str]) -> None:
    """Raises UserError if shards in the files `names` of the checkpoint `folder` do not make up their tensors."""
    for plugin, paths in _by_plugin(folder, names).items():
        stored = StoredTensors(folder, paths)
        wrong = sorted(name for name in stored.shards if not stored.is_whole(name))
        if wrong:
            raise UserError(
                f"events.{plugin}: the shards of all processes together have missing or repeated elements of "
                f"{', '.join(wrong[:3])}; EventListener.shards must return each element on one process"
            )


def _by_plugin(folder: Path, names: Iterable[str]) -> dict[str, list[Path]]:
    """Returns the files of each event plugin among the files `names` of the checkpoint `folder`."""
    files: dict[str, list[Path]] = {}
    for name in sorted(names):
        if (match := FILE.fullmatch(name)) is not None:
            files.setdefault(match["plugin"], []).append(folder / name)
    return files


def plugins_in(folder: Path) -> list[str]:
    """Returns the event plugins that have tensors in the checkpoint `folder`, by its manifest."""
    return sorted(_by_plugin(folder, read_manifest(folder)["files"]))


class SavedEventTensors(SavedTensors):
    """The tensors of `plugin` in the checkpoint `folder`. Reading raises UserError where a part of one is missing."""

    def __init__(self, folder: Path, plugin: str) -> None:
        self._stored = StoredTensors(folder, _by_plugin(folder, read_manifest(folder)["files"])[plugin])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._stored.shards:
            raise KeyError(name)
        return self._stored(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.shards)

    def __len__(self) -> int:
        return len(self._stored.shards)

    def __contains__(self, name: object) -> bool:
        return name in self._stored.shards

    def at(self, shard: TensorShard) -> Tensor:
        if shard.name not in self:
            raise KeyError(shard.name)
        if isinstance(shard.start, int):
            return self._stored.part(shard.name, shard.start, shard.value.numel())
        return self._stored.box(shard.name, shard.start, shard.value.shape)


def load_weights(folder: Path, plugin: str, module: nn.Module) -> None:
    """Sets the weights of a plain `module`, which has those of the checkpoint `folder`, to those that the event plugin
    `plugin` has there under the same names. Weights that it does not have, such as frozen ones, stay. Raises UserError
    if the plugin has no tensors there, or others than weights."""
    known = plugins_in(folder)
    if plugin not in known:
        there = f"it has those of {', '.join(known)}" if known else "its run has none"
        raise UserError(f"{folder}: expected weights of an event plugin {plugin}, such as ema; {there}")
    weights, own = SavedEventTensors(folder, plugin), dict(saved_values(module))
    if not weights:
        raise UserError(f"{folder}: the event plugin {plugin} has no weights yet at this step; export a later one")
    with torch.no_grad():
        for name, value in weights.items():
            if name not in own or own[name].shape != value.shape:
                raise UserError(f"{folder}: {name}, of the event plugin {plugin}, is no weight of the model")
            own[name].copy_(value)
