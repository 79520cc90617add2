"""A copy in host memory of the shards that a process saves: copied while training pauses, written in the background."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.distributed.all_ranks import Shutdown
from terakoya.toolkit.formats import model_folder
from terakoya.training.checkpoint.event_tensors import EventTensors
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.tensor_shards import KINDS, Kind, TensorShard
from terakoya.training.model.module_parts import named_values


class Snapshot:
    """The shards of an engine's state that this process saves, as they were when `take` was called last. The memory is
    reused from one copy to the next, so that a run allocates all of it at its first save. Tensors on a GPU are copied
    into pinned memory. `shutdown` is set when this process is about to leave and reading must end."""

    def __init__(self, shutdown: threading.Event) -> None:
        self.shutdown = shutdown
        self.memory: dict[Hashable, Tensor] = {}
        self.shards: dict[Kind, list[TensorShard]] = {}

    def take(self, engine: Engine) -> None:
        """Copies the shards that this process saves of `engine`; collective if `shards_to_save` is."""
        for kind in KINDS:
            self.shards[kind] = [
                replace(shard, value=self._copy((kind, shard.name, shard.start), shard.value))
                for shard in engine.shards_to_save(kind)
            ]
        _wait_for_copies()

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """Yields the copied shards, in this process only; see `Engine`. Raises Shutdown if `shutdown` is set."""
        for shard in self.shards[kind]:
            if self.shutdown.is_set():
                raise Shutdown
            yield shard

    def copy_models(self, exported: Mapping[str, PreTrainedModel]) -> Callable[[Path], None]:
        """Copies the weights and configs of `exported`, by sub-folder; returns a function that writes them into a
        checkpoint."""
        copies: dict[Hashable, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {}
        models: dict[str, PreTrainedModel] = {}
        for name, model in exported.items():
            models[name], states[name] = copy.copy(model), {}
            models[name].config = copy.deepcopy(model.config)  # later steps may change that of the run
            for key, value in model.state_dict().items():
                identity = (value.data_ptr(), value.shape, value.stride())  # tied weights stay tied
                if identity not in copies:
                    copies[identity] = self._copy((name, key), value)
                states[name][key] = copies[identity]
        _wait_for_copies()

        def write(folder: Path) -> None:
            for name, model in models.items():
                model_folder.write(model, folder / "model" / name, states[name])

        return write

    def copy_trained(self, module: nn.Module) -> dict[int, Tensor]:
        """Copies what training changes of `module`: trained parameters and buffers; returns the copies by the ids of
        their tensors."""
        copies = {
            id(value): self._copy(("trained", name), value)
            for name, value in named_values(module)
            if value.requires_grad or not isinstance(value, nn.Parameter)
        }
        _wait_for_copies()
        return copies

    def copy_tensors(self, tensors: EventTensors) -> EventTensors:
        """Returns copies of the tensors of event plugins."""
        copies = {
            plugin: [
                replace(shard, value=self._copy(("event", plugin, shard.name, shard.start), shard.value))
                for shard in shards
            ]
            for plugin, shards in tensors.items()
        }
        _wait_for_copies()
        return copies

    def _copy(self, key: Hashable, value: Tensor) -> Tensor:
        held = self.memory.get(key)
        if held is None or held.shape != value.shape or held.dtype != value.dtype:
            held = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self.memory[key] = held
        with torch.no_grad():
            return held.copy_(value, non_blocking=True)


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
