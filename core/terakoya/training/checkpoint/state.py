"""The `state/` folder of a checkpoint: tensors, whole or in shards that many processes wrote.

    state/model-RANK.safetensors             parameters and buffers, fp32, under the root module's names
          model-RANK-PART.safetensors        more of them, where a process has more than `FILE_BYTES`
          optimizer-RANK[-PART].safetensors  the optimizer's state, as `parameter_name/state_name`

A tensor in a file is whole, under its own name, or a shard. The file's header locates the shards, under `pieces`: a
JSON object from the shard's name in the file to `[name, shape, start]` of the whole tensor. `start` is a number where
the shard is a range (n,) of the flattened tensor, as ZeRO cuts it, or the first corner of a box. Each element is
written once; readers need not know which process wrote it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from terakoya.atomic_files import FileFacts
from terakoya.errors import UserError
from terakoya.runs.checkpoints import MANIFEST, read_manifest
from terakoya.toolkit.deferred_tensors import DeferredTensors
from terakoya.toolkit.formats import model_folder
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.tensor_shards import KINDS, Kind, TensorShard
from terakoya.training.model.module_parts import saved_values

FILE_BYTES = 1 << 30
"""A process begins another file when one has reached this size."""
HEADER = "pieces"
"""The key in a file's header under which its shards are located."""


class ShardSource(Protocol):
    """Where the shards come from that this process writes: an `Engine`, or a `Snapshot` of one."""

    def shards_to_save(self, kind: Kind) -> Iterable[TensorShard]:
        """See `Engine`."""


# --------------------------------------------------------------------------------------------------------- writing


class WrittenState(NamedTuple):
    """What one rank wrote.

    Attributes:
        files: name -> size and SHA-256 of each file, after it was flushed to disk.
        not_finite: names of tensors with a NaN or an infinity; their shards, and those after them, were not written.
    """

    files: dict[str, dict[str, Any]]
    not_finite: list[str]


def write(folder: Path, rank: int, source: ShardSource) -> WrittenState:
    """Writes the shards of `source` as the files of `rank` into `folder`, which is a checkpoint's `state/`. Raises
    OSError if a file could not be written.

    Iterating over shards may be collective: after a failure the loop continues to their end without writing, so that no
    rank waits for ever. Rank 0 writes a file even if it has no shards.
    """
    written = WrittenState({}, [])
    failure: OSError | None = None
    for kind in KINDS:
        part = 0
        for shards in _group_by_file(source.shards_to_save(kind), even_empty=rank == 0):
            written.not_finite.extend(shard.name for shard in shards if not is_finite(shard.value))
            if failure is not None or written.not_finite:
                continue
            name = f"{kind}-{rank:05d}" + (f"-{part:05d}" if part else "") + ".safetensors"
            part += 1
            try:
                write_file(folder / name, shards)
                written.files[name] = FileFacts.of(folder / name, sync=True).model_dump()
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    return written


def is_finite(value: Tensor) -> bool:
    """Whether no element of `value` is a NaN or an infinity. A sum passes over the memory once and keeps both; only a
    sum that overflows needs a second look."""
    if not value.is_floating_point():
        return True
    if value.element_size() == 1:  # torch adds up no float8
        value = value.float()
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())


def _group_by_file(shards: Iterable[TensorShard], *, even_empty: bool) -> Iterator[list[TensorShard]]:
    """Yields the shards of each file; with `even_empty` an empty list where there are no shards."""
    group: list[TensorShard] = []
    size, any_yielded = 0, False
    for shard in shards:
        group.append(shard)
        size += shard.nbytes
        if size >= FILE_BYTES:
            any_yielded = True
            yield group
            group, size = [], 0
    if group or (even_empty and not any_yielded):
        yield group


def write_file(path: Path, shards: Iterable[TensorShard]) -> None:
    """Writes `shards` into the file `path`. Raises OSError."""
    tensors: dict[str, Tensor] = {}
    locations: dict[str, tuple[Any, ...]] = {}
    for shard in shards:
        key, value = shard.name, shard.value.detach().cpu()
        if shard.is_whole:
            value = value.reshape(shard.shape)
        else:
            key += f"@{json.dumps(shard.start, separators=(',', ':'))}"
            locations[key] = (shard.name, shard.shape, shard.start)
        assert key not in tensors, f"{key} is written twice"
        tensors[key] = value.contiguous()
    with model_folder.safetensors_as_os_errors(path):
        save_file(tensors, path, {"format": "pt", HEADER: json.dumps(locations)} if locations else {"format": "pt"})


# --------------------------------------------------------------------------------------------------------- reading


class _StoredShard(NamedTuple):
    """A shard in the file `path`, under the name `key`: where it begins in the whole tensor, which has the `shape`."""

    path: Path
    key: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    start: int | tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shard_shape)

    def read(self) -> Tensor:
        """Returns its values, of which those that are used are read. The file is mapped into memory for as long as the
        tensor lives, so that what was read of it no longer counts for this process then."""
        with safe_open(self.path, "pt") as file:
            value: Tensor = file.get_tensor(self.key)
            return value

    def flat_start(self) -> int | None:
        """Returns the first element's index in the flattened tensor; None where the shard is not one range of it."""
        if isinstance(self.start, int):
            return self.start
        if self.shard_shape[1:] != self.shape[1:]:
            return None
        return self.start[0] * math.prod(self.shape[1:]) if self.start else 0


class StoredTensors:
    """The tensors in some files of a checkpoint, read one at a time."""

    def __init__(self, folder: Path, paths: Iterable[Path]) -> None:
        """Finds the tensors in the files `paths` of the checkpoint `folder`."""
        self.folder = folder
        self.shards: defaultdict[str, list[_StoredShard]] = defaultdict(list)
        for path in paths:
            with safe_open(path, "pt") as file:
                locations = json.loads((file.metadata() or {}).get(HEADER, "{}"))
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    shard_shape = tuple(file.get_slice(key).get_shape())
                    name, shape, start = locations.get(key, (key, shard_shape, (0,) * len(shard_shape)))
                    start = start if isinstance(start, int) else tuple(start)
                    self.shards[name].append(_StoredShard(path, key, tuple(shape), shard_shape, start))

    def names(self) -> frozenset[str]:
        return frozenset(self.shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the whole tensor `name`. Raises UserError like a call."""
        return self._shards_of(name)[0].shape

    def __call__(self, name: str) -> Tensor:
        """Returns the whole tensor `name`, on the CPU. Raises UserError if the checkpoint has no such tensor, and is of
        another model, or a part of the tensor is missing."""
        shards = self._shards_of(name)
        if len(shards) == 1:
            return shards[0].read().reshape(shards[0].shape)
        whole: Tensor | None = None
        for shard in shards:
            value = shard.read()
            whole = torch.empty(shard.shape, dtype=value.dtype) if whole is None else whole
            if isinstance(shard.start, int):
                whole.view(-1)[shard.start : shard.start + len(value)] = value
            else:
                box = (slice(at, at + size) for at, size in zip(shard.start, shard.shard_shape, strict=True))
                whole[tuple(box)] = value
        assert whole is not None, "a tensor that is whole has shards"
        return whole

    def part(self, name: str, start: int, size: int) -> Tensor:
        """Returns the elements [start, start + size) of the flattened tensor `name`: (size,), on the CPU.

        Reads only the parts of files that hold these elements. Raises UserError like a call.
        """
        shards = self._shards_of(name)
        flat_starts = [shard.flat_start() for shard in shards]
        if None in flat_starts:
            return self(name).flatten().narrow(0, start, size)
        parts = []
        for shard, first in sorted(zip(shards, flat_starts, strict=True), key=lambda pair: pair[1] or 0):
            assert first is not None
            low, high = max(start, first), min(start + size, first + shard.size)
            if low < high:  # files are mapped into memory: elements that are not used are not read
                parts.append(shard.read().flatten()[low - first : high - first])
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else shards[0].read().flatten()[:0]

    def box(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Returns the box of the tensor `name` that begins at `start` and has the shape `size`, on the CPU.

        Reads only the parts of files that hold it, except where shards are ranges that are no rows. Raises UserError
        like a call.
        """
        shards = self._shards_of(name)
        shape = shards[0].shape
        if tuple(size[1:]) == shape[1:]:  # whole rows, or a number
            width = math.prod(shape[1:])
            return self.part(name, start[0] * width if start else 0, math.prod(size)).view(tuple(size))
        if any(isinstance(shard.start, int) for shard in shards):
            return self(name)[tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))]
        found: Tensor | None = None
        for shard in shards:
            assert isinstance(shard.start, tuple)
            corners = zip(start, size, shard.start, shard.shard_shape, strict=True)
            spans = [(max(a, b), min(a + m, b + n)) for a, m, b, n in corners]  # of the whole tensor, in each dimension
            if all(low < high for low, high in spans):
                there = tuple(slice(low - b, high - b) for (low, high), b in zip(spans, shard.start, strict=True))
                here = tuple(slice(low - a, high - a) for (low, high), a in zip(spans, start, strict=True))
                values = shard.read()[there]
                found = torch.empty(tuple(size), dtype=values.dtype) if found is None else found
                found[here] = values
        return shards[0].read().new_empty(tuple(size)) if found is None else found

    def _shards_of(self, name: str) -> list[_StoredShard]:
        if name not in self.shards:
            raise UserError(f"{self.folder}: has no tensor {name}; it was saved from another architecture or objective")
        if not self.is_whole(name):
            raise UserError(f"{self.folder}: a part of {name} is missing, with its files; take another checkpoint")
        return self.shards[name]

    def is_whole(self, name: str) -> bool:
        """Whether the shards of the tensor `name` together have as many elements as the tensor."""
        shards = self.shards[name]
        return sum(shard.size for shard in shards) == math.prod(shards[0].shape)


class SavedState(StoredTensors):
    """The tensors of `kind` in a checkpoint's `state/`: in the files that its manifest names, in all of them while it
    is being written and has none."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        found = sorted((folder / "state").glob(f"{kind}-*.safetensors"))
        if (folder / MANIFEST).exists():
            named = read_manifest(folder)["files"]
            found = [path for path in found if path.relative_to(folder).as_posix() in named]
        super().__init__(folder, found)


def incomplete_tensors(folder: Path) -> list[str]:
    """Returns the names of tensors in the checkpoint `folder` with elements that are missing or written twice."""
    states = [SavedState(folder, kind) for kind in KINDS]
    return sorted(name for state in states for name in state.names() if not state.is_whole(name))


def load(folder: Path, engine: Engine) -> None:
    """Sets the parameters and the optimizer state of `engine` from the checkpoint `folder`; collective."""
    engine.load_parameters(SavedState(folder, "model"))
    optimizer = SavedState(folder, "optimizer")
    engine.load_optimizer_state(optimizer, optimizer.names())


def check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError if the checkpoint `folder` has another shape than `shapes` for a tensor of the whole model."""
    state = SavedState(folder, "model")
    for name in sorted(state.names() & shapes.keys()):
        saved, expected = state.shape(name), shapes[name]
        if saved != expected and not math.prod(saved) == math.prod(expected) == 1:
            raise UserError(
                f"{folder}: {name} has the shape {list(saved)}, and the model of the parameters {list(expected)}: "
                "a run cannot change the sizes of its model; set them as they were, or start a new run"
            )


def load_module(folder: Path, module: torch.nn.Module, deferred: DeferredTensors | None = None) -> None:
    """Sets the parameters of a plain `module` from the checkpoint `folder`, in this process only. What is `deferred` is
    read when its value is asked for. Raises UserError if the checkpoint is of another model."""
    state = SavedState(folder, "model")
    values = dict(saved_values(module))
    unknown = state.names() - values.keys()
    if unknown:
        raise UserError(f"{folder}: has tensors this model does not know: {', '.join(sorted(unknown)[:5])}")
    with torch.no_grad():
        for name, value in values.items():
            if deferred is not None and state.shape(name) == value.shape:
                value.copy_(deferred.read_later(tuple(value.shape), value.dtype, partial(state, name)))
            else:
                value.copy_(state(name))
