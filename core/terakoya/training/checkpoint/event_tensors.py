"""The tensors of event plugins in a checkpoint: `events/NAME.safetensors` for each plugin that keeps some, which rank 0
writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from terakoya.errors import UserError
from terakoya.runs.checkpoints import read_manifest
from terakoya.toolkit.formats import model_folder
from terakoya.training.model.module_parts import saved_values

FOLDER = "events"
ENDING = ".safetensors"

EventTensors = Mapping[str, Mapping[str, Tensor]]
"""Event plugin -> name -> tensor."""


def write(folder: Path, tensors: EventTensors) -> None:
    """Writes `tensors` into the checkpoint `folder`, which has no manifest yet. Raises OSError."""
    for plugin, values in tensors.items():
        (folder / FOLDER).mkdir(exist_ok=True)
        path = folder / FOLDER / f"{plugin}{ENDING}"
        with model_folder.safetensors_as_os_errors(path):
            save_file({name: value.detach().cpu().contiguous() for name, value in values.items()}, path)


def plugins_in(folder: Path) -> list[str]:
    """Returns the event plugins that have tensors in the checkpoint `folder`, by its manifest."""
    names = [Path(name) for name in read_manifest(folder)["files"] if name.startswith(f"{FOLDER}/")]
    return sorted(name.name.removesuffix(ENDING) for name in names)


class SavedEventTensors(Mapping[str, Tensor]):
    """The tensors of `plugin` in the checkpoint `folder`, on the CPU; each is read when it is asked for."""

    def __init__(self, folder: Path, plugin: str) -> None:
        self._file = safe_open(folder / FOLDER / f"{plugin}{ENDING}", "pt")
        self._names = tuple(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_weights(folder: Path, plugin: str, module: nn.Module) -> None:
    """Sets the weights of a plain `module`, which has those of the checkpoint `folder`, to those that the event plugin
    `plugin` has there under the same names. Weights that it does not have, such as frozen ones, stay.

    Raises:
        UserError: the plugin has no tensors there, or others than weights.
    """
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
