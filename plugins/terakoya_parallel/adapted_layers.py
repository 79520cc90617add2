"""The linear layers of a block by their names in its family, whether or not peft has put adapters around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from terakoya.training.model.lora import ADAPTER

COPIES = "modules_to_save"
"""The attribute of peft's wrapper around a module that is trained whole: the copy that is trained, by adapter."""
BASE = "base_layer"
"""The attribute of peft's wrapper around a layer with an adapter: the layer."""


def find_layer(block: nn.Module, name: str) -> nn.Module:
    """Returns the module that `block` calls under `name`: peft's wrapper where it has an adapter, and the copy that is
    trained where it, or a module around it, is trained whole."""
    return block.get_submodule(_actual_name(block, name))


def input_layers(layer: nn.Module) -> list[nn.Module]:
    """Returns the linear layers that take the inputs of `layer`: itself, or under an adapter also the first matrix."""
    return _layers(layer, "lora_A")


def output_layers(layer: nn.Module) -> list[nn.Module]:
    """Returns the linear layers whose outputs add up to those of `layer`: itself, or under an adapter also the second
    matrix."""
    return _layers(layer, "lora_B")


def drops_inputs(module: nn.Module) -> bool:
    """Whether an adapter in `module` applies dropout to its inputs."""
    found: Iterator[Any] = (each for each in module.modules() if hasattr(each, "lora_dropout"))
    return any(isinstance(each.lora_dropout[ADAPTER], nn.Dropout) for each in found)


def _layers(layer: Any, matrix: str) -> list[nn.Module]:
    return [getattr(layer, BASE), getattr(layer, matrix)[ADAPTER]] if hasattr(layer, BASE) else [layer]


def _actual_name(block: nn.Module, name: str) -> str:
    found: list[str] = []
    for part in ["", *name.split(".")]:
        found += [part] if part else []
        if isinstance(getattr(block.get_submodule(".".join(found)), COPIES, None), nn.ModuleDict):
            found += [COPIES, ADAPTER]
    return ".".join(found)
