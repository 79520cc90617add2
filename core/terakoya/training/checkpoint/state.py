"""What lies in a checkpoint's `state/`: tensors, whole or in pieces that many processes wrote.

    state/model-RANK.safetensors             parameters and buffers, fp32, under the root module's names
          model-RANK-PART.safetensors        more of them, where a process has more than `FILE_BYTES`
          optimizer-RANK[-PART].safetensors  the optimizer's state, as `parameter_name/state_name`

A file's tensor is whole, under its own name, or a piece. Of pieces the file's header says, under `pieces`, where they
lie: a JSON object from the piece's name in the file to `[name, shape, start]` of the tensor. `start` is a number where
the piece is a range (n,) of the flattened tensor, as ZeRO cuts, or the first corner of a box. Each element is written
once; who wrote it does not matter to who reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from terakoya.errors import UserError
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.tensor_shards import KINDS, Kind, TensorShard
from terakoya.training.model.module_parts import saved_values

FILE_BYTES = 1 << 30
"""A process goes on in another file when one has reached this size."""
HEADER = "pieces"


class ShardSource(Protocol):
    """Who says what this process writes: an `Engine`, or a copy of what it gave."""

    def shards_to_save(self, kind: Kind) -> Iterable[TensorShard]:
        """See `Engine`."""


# --------------------------------------------------------------------------------------------------------- writing


def write(folder: Path, rank: int, owner: ShardSource) -> dict[str, dict[str, Any]]:
    """Writes what `owner` gives as the files of `rank` into the folder `state/`.

    Returns:
        name -> `file_facts` of each file, which is on the disk for good.

    Going through pieces may be collective: after a failure it goes on to their end, and nothing more is written, so
    that no rank is left waiting. Rank 0 writes a file even if it holds nothing.

    Raises:
        OSError: a file could not be written.
    """
    files: dict[str, dict[str, Any]] = {}
    failure: OSError | None = None
    for kind in KINDS:
        part = 0
        for pieces in _groups(owner.shards_to_save(kind), even_empty=rank == 0):
            if failure is not None:
                continue
            name = f"{kind}-{rank:05d}" + (f"-{part:05d}" if part else "") + ".safetensors"
            part += 1
            try:
                _write_file(folder / name, pieces)
                files[name] = file_facts(folder / name, sync=True)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    return files


def _groups(pieces: Iterable[TensorShard], *, even_empty: bool) -> Iterator[list[TensorShard]]:
    """What goes into each file."""
    pending: list[TensorShard] = []
    size, found = 0, False
    for piece in pieces:
        pending.append(piece)
        size += piece.nbytes
        if size >= FILE_BYTES:
            found = True
            yield pending
            pending, size = [], 0
    if pending or (even_empty and not found):
        yield pending


def _write_file(path: Path, pieces: Iterable[TensorShard]) -> None:
    tensors: dict[str, Tensor] = {}
    described: dict[str, tuple[Any, ...]] = {}
    for piece in pieces:
        key, value = piece.name, piece.value.detach().cpu()
        if piece.is_whole:
            value = value.reshape(piece.shape)
        else:
            key += f"@{json.dumps(piece.start, separators=(',', ':'))}"
            described[key] = (piece.name, piece.shape, piece.start)
        assert key not in tensors, f"{key} is written twice"
        tensors[key] = value.contiguous()
    try:
        save_file(tensors, path, {"format": "pt", HEADER: json.dumps(described)} if described else {"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path}: {error}") from error


def file_facts(path: Path, *, sync: bool = False) -> dict[str, Any]:
    """What a manifest says of the file `path`: `size` and `sha256`; with `sync` it is on the disk for good."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


# --------------------------------------------------------------------------------------------------------- reading


class _Stored(NamedTuple):
    """A piece in a file: its name there, the whole tensor's shape, the part's own, and where it starts in the whole."""

    file: Any
    key: str
    shape: tuple[int, ...]
    own: tuple[int, ...]
    start: int | tuple[int, ...]

    def flat_start(self) -> int | None:
        """The element of the flattened whole that the part starts with; None where it is not one range of it."""
        if isinstance(self.start, int):
            return self.start
        if self.own[1:] != self.shape[1:]:
            return None
        return self.start[0] * math.prod(self.shape[1:]) if self.start else 0


class SavedState:
    """The tensors in a checkpoint's `state/`, read one at a time, by whoever they were written."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        """Opens `kind` of the checkpoint `folder`."""
        self.folder = folder
        self.stored: defaultdict[str, list[_Stored]] = defaultdict(list)
        for path in sorted((folder / "state").glob(f"{kind}-*.safetensors")):
            file = safe_open(path, "pt")
            described = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            for key in file.keys():  # noqa: SIM118 - not a mapping
                own = tuple(file.get_slice(key).get_shape())
                name, shape, start = described.get(key, (key, own, (0,) * len(own)))
                there = start if isinstance(start, int) else tuple(start)
                self.stored[name].append(_Stored(file, key, tuple(shape), own, there))

    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor `name`. UserError as a call."""
        return self._found(name)[0].shape

    def __call__(self, name: str) -> Tensor:
        """The whole tensor `name`, on the CPU.

        Raises:
            UserError: the checkpoint has no such tensor, and so is of another model, or lacks a part of it.
        """
        found = self._found(name)
        first: Tensor = found[0].file.get_tensor(found[0].key)
        if len(found) == 1:
            return first.reshape(found[0].shape)
        whole = torch.empty(found[0].shape, dtype=first.dtype)
        for each in found:
            value = each.file.get_tensor(each.key)
            if isinstance(each.start, int):
                whole.view(-1)[each.start : each.start + len(value)] = value
            else:
                box = (slice(at, at + size) for at, size in zip(each.start, each.own, strict=True))
                whole[tuple(box)] = value
        return whole

    def part(self, name: str, start: int, size: int) -> Tensor:
        """The elements [start, start + size) of the flattened tensor `name`: (size,), on the CPU. Files are read where
        they lie in. UserError as a call."""
        found = self._found(name)
        at = [each.flat_start() for each in found]
        if None in at:
            return self(name).flatten().narrow(0, start, size)
        taken = []
        for each, first in sorted(zip(found, at, strict=True), key=lambda pair: pair[1] or 0):
            assert first is not None
            low, high = max(start, first), min(start + size, first + math.prod(each.own))
            if low < high:  # what a file holds is mapped into memory: what is not looked at is not read
                taken.append(each.file.get_tensor(each.key).flatten()[low - first : high - first])
        return taken[0] if len(taken) == 1 else torch.cat(taken) if taken else torch.empty(0)

    def _found(self, name: str) -> list[_Stored]:
        if name not in self.stored:
            raise UserError(f"{self.folder}: has no tensor {name}; it was saved from another architecture or objective")
        if not self.is_whole(name):
            raise UserError(f"{self.folder}: lacks a part of {name}; files of it are missing: take another checkpoint")
        return self.stored[name]

    def is_whole(self, name: str) -> bool:
        """Whether the pieces of the tensor `name` have as many elements as it."""
        found = self.stored[name]
        return sum(math.prod(each.own) for each in found) == math.prod(found[0].shape)


def incomplete(folder: Path) -> list[str]:
    """The tensors in the checkpoint `folder` of which not every element is there, or some more than once."""
    states = [SavedState(folder, kind) for kind in KINDS]
    return sorted(name for state in states for name in state.names() if not state.is_whole(name))


def load(folder: Path, engine: Engine) -> None:
    """Sets parameters and optimizer of `engine` from the checkpoint `folder`; collective."""
    engine.load_parameters(SavedState(folder, "model"))
    optimizer = SavedState(folder, "optimizer")
    engine.load_optimizer_state(optimizer, optimizer.names())


def load_module(folder: Path, module: torch.nn.Module) -> None:
    """Sets the parameters of a plain `module` from the checkpoint `folder`, in this process alone."""
    state = SavedState(folder, "model")
    values = dict(saved_values(module))
    surplus = state.names() - values.keys()
    if surplus:
        raise UserError(f"{folder}: has tensors this model does not know: {', '.join(sorted(surplus)[:5])}")
    with torch.no_grad():
        for name, value in values.items():
            value.copy_(state(name))
