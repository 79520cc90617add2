"""The parts of a root module: its weights by name, as checkpoints hold them, its models, and their architectures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture, Objective
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError

ADAPTED = "adapted"
"""The attribute of a root module with adapters: its own weights stay as they are in their folder, only the adapters
are trained."""


def saved_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the part of `named_values` that a checkpoint holds: all, or what is trained if `module` is `ADAPTED`."""
    adapted = getattr(module, ADAPTED, False)
    for name, value in named_values(module):
        if value.requires_grad or not adapted:
            yield name, value


def named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of each parameter (tied ones once) and each persistent buffer of `module`."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def top_level_models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yields each Transformers model in `module` that is not part of another."""
    outer_names: list[str] = []
    for name, child in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in outer_names)
        if isinstance(child, PreTrainedModel) and not inside:
            outer_names.append(name)
            yield child


def all_architectures(architecture: Architecture, objective: Objective) -> list[Architecture]:
    """The run's `architecture` and those in the settings of its `objective`."""
    return [architecture, *(value for value in dict(objective).values() if isinstance(value, Architecture))]


def architecture_of(
    model: PreTrainedModel, architectures: Sequence[Architecture], vocabulary: Vocabulary, *, key: str
) -> Architecture:
    """The one of `architectures` that builds models of the type of `model`.

    Raises:
        UserError: none of them does; `key` is the setting that needs to know the layers.
    """
    for architecture in architectures:
        if isinstance(model.config, type(architecture.config(vocabulary))):
            return architecture
    raise UserError(f"{key}: no architecture of the parameters defines the layers of {type(model)}")
