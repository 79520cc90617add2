"""Weights by name, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError

ADAPTED = "adapted"
"""The attribute of a root module whose own weights lie in a folder and stay so: adapters are trained over them."""


def saved_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of `named_values` what a checkpoint holds: all, or, of a module that is `ADAPTED`, what is trained."""
    adapted = getattr(module, ADAPTED, False)
    for name, value in named_values(module):
        if value.requires_grad or not adapted:
            yield name, value


def named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each parameter (tied ones once) and each persistent buffer of `module`."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def top_level_models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Each of Transformers' models in `module` that is not part of another."""
    found: list[str] = []
    for name, each in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(each, PreTrainedModel) and not inside:
            found.append(name)
            yield each


def architecture_of(
    parameters: Parameters, model: PreTrainedModel, vocabulary: Vocabulary, *, key: str
) -> Architecture:
    """The architecture, the run's own or one in the objective's settings, that builds models of this type.

    Raises:
        UserError: there is none; `key` is the setting that asks for its layers.
    """
    nested = [value for value in dict(parameters.objective).values() if isinstance(value, Architecture)]
    for architecture in [parameters.architecture, *nested]:
        if isinstance(model.config, type(architecture.config(vocabulary))):
            return architecture
    raise UserError(f"{key}: no architecture of the parameters says where the layers of {type(model)} are")
