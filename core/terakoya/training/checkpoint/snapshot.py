"""A copy in host memory of what a process writes into a checkpoint: made while training stands, written behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from terakoya.toolkit.formats import model_folder
from terakoya.training.distributed.all_ranks import Shutdown
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.tensor_shards import KINDS, Kind, TensorShard


class Snapshot:
    """What this process owned of an engine's state when `take` was called last.

    The memory is kept from one copy to the next, so that a run has what it needs from its first save on; what comes
    from a GPU is copied into pinned memory.

    Attributes:
        shutdown: set when nobody wants to read on.
    """

    def __init__(self, shutdown: threading.Event) -> None:
        self.shutdown = shutdown
        self.memory: dict[Hashable, Tensor] = {}
        self.pieces: dict[Kind, list[TensorShard]] = {}

    def take(self, engine: Engine) -> None:
        """Copies what this process owns of `engine`; collective if `shards_to_save` is."""
        for kind in KINDS:
            self.pieces[kind] = [
                replace(piece, value=self._copy((kind, piece.name, piece.start), piece.value))
                for piece in engine.shards_to_save(kind)
            ]
        _wait_for_copies()

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`, but here alone. Raises Leaving."""
        for piece in self.pieces[kind]:
            if self.shutdown.is_set():
                raise Shutdown
            yield piece

    def models(self, exported: Mapping[str, PreTrainedModel]) -> Callable[[Path], None]:
        """Copies the weights of `exported`, by sub-folder; returns what writes them into a checkpoint's `model/`."""
        copies: dict[Hashable, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {}
        for name, model in exported.items():
            states[name] = {}
            for key, value in model.state_dict().items():
                same = (value.data_ptr(), value.shape, value.stride())  # tied weights stay tied
                if same not in copies:
                    copies[same] = self._copy((name, key), value)
                states[name][key] = copies[same]
        _wait_for_copies()

        def write(folder: Path) -> None:
            for name, model in exported.items():
                model_folder.write(model, folder / "model" / name, states[name])

        return write

    def _copy(self, where: Hashable, value: Tensor) -> Tensor:
        there = self.memory.get(where)
        if there is None or there.shape != value.shape or there.dtype != value.dtype:
            there = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self.memory[where] = there
        with torch.no_grad():
            return there.copy_(value, non_blocking=True)


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
