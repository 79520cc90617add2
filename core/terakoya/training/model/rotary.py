"""Rotary positions with another base in the middle of a run, as longer rows need them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from terakoya.training.model.module_parts import top_level_models

FREQUENCIES = "inv_freq"
"""How the names of the buffers end that Transformers computes from the base."""


def set_rotary_base(module: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Gives the models in `module` the rotary positions of those that `build` makes: the frequencies in place, as
    compiled code and engines hold them, and the configs that exports write. The stages of a pipeline each have a part
    of the one model that is built."""
    with torch.device("meta"):
        wanted = build()
    ours, theirs = list(top_level_models(module)), list(top_level_models(wanted))
    for number, model in enumerate(ours):
        _set_model(model, theirs[number] if len(theirs) > 1 else theirs[0])


def _set_model(model: PreTrainedModel, wanted: PreTrainedModel) -> None:
    modules = dict(model.named_modules())
    for name, part in wanted.named_modules():
        ours = modules.get(name)
        if ours is None:
            continue  # of another stage
        if isinstance(ours, PreTrainedModel) and hasattr(part.config, "rope_parameters"):
            ours.config.rope_parameters = part.config.rope_parameters
        frequencies = [each for each, _ in part.named_buffers(recurse=False) if each.endswith(FREQUENCIES)]
        if frequencies:
            computed = type(part)(part.config)  # on the CPU: `part` has no values
            with torch.no_grad():
                for each in frequencies:
                    ours.get_buffer(each).copy_(computed.get_buffer(each))
