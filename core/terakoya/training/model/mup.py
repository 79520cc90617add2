"""Maximal update parametrisation (Yang et al., 2022, Tensor Programs V, arXiv:2203.03466): initial values and learning
rates with which a learning rate does the same at any width.

A twin of the module with twice the width, without data, shows which dimensions of each tensor are widths. See
docs/design/mup.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.training.model.module_parts import architecture_of, input_axis, norm_before_tied_head, top_level_models


@dataclass(frozen=True)
class Scale:
    """What a tensor has at this width, as multiples of what it has at the base width: its initial values, and its
    learning rate."""

    initial: float
    rate: float


def find_scales(parameters: Parameters, module: nn.Module, vocabulary: Vocabulary) -> dict[str, Scale]:
    """Returns the scale of each parameter of `module`, the root module of `parameters`; none where all are 1."""
    if parameters.mup is None:
        return {}
    architecture, objective = parameters.architecture, parameters.objective
    ratio = architecture.hidden_size / parameters.mup.base_width  # type: ignore[attr-defined] # one of its mup_widths
    if ratio == 1:
        return {}
    nested = {key: widen(value) for key, value in dict(objective).items() if isinstance(value, Architecture)}
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        wider = objective.model_copy(update=nested).build(widen(architecture), vocabulary)
    norms = []
    for model in top_level_models(module):
        own = architecture_of(model, objective.architectures(architecture), vocabulary, key="mup")
        norms.append(norm_before_tied_head(model, own.blocks(model)))
    return compare(module, wider, ratio, [each for each in norms if each is not None])


def widen(architecture: Architecture) -> Architecture:
    """Returns `architecture` with all its widths twice as large."""
    return architecture.scale_width(Fraction(2), architecture.mup_widths)


def compare(module: nn.Module, wider: nn.Module, ratio: float, norms: Collection[nn.Module]) -> dict[str, Scale]:
    """Returns the scale of each parameter of `module`, by its name.

    Args:
        wider: the same module with twice the width; only its shapes are read. A dimension that differs is a width.
        ratio: the width of `module`, divided by the base width.
        norms: those before a head that is tied to embeddings. They make the head's outputs smaller: the embeddings must
            stay as they are, and a factor of the outputs would be no plain model of Transformers.
    """
    shapes = {name: value.shape for name, value in wider.named_parameters()}
    embeddings = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    before_heads = {id(value) for norm in norms for value in norm.parameters()}
    scales = {}
    for name, value in module.named_parameters():
        is_width = [here != there for here, there in zip(value.shape, shapes[name], strict=True)]
        owner = module.get_submodule(name.rpartition(".")[0])
        axis = None if id(value) in embeddings else input_axis(owner, value)
        if id(value) in before_heads and is_width[0]:
            scales[name] = Scale(1 / ratio, 1 / ratio)
        elif axis is None or not is_width[axis]:
            scales[name] = Scale(1.0, 1.0)
        elif is_width[1 - axis]:
            scales[name] = Scale(1 / math.sqrt(ratio), 1 / ratio)
        else:  # few outputs: sums over inputs that have learnt together grow with the number of inputs
            scales[name] = Scale(1 / ratio, 1 / ratio)
    return scales


@torch.no_grad()
def scale_initial_values(module: nn.Module, scales: Mapping[str, Scale]) -> None:
    """Multiplies the initial values of `module` by those of its `scales`."""
    for name, value in module.named_parameters():
        if name in scales and scales[name].initial != 1.0:
            value.mul_(scales[name].initial)
