"""Rotary positions with another base in the middle of a run, as a phase with longer rows has them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

FREQUENCIES = "inv_freq"
"""How the names of the buffers end that Transformers computes from the base."""


def set_rotary_base(module: nn.Module, wanted: nn.Module) -> None:
    """Gives the models in `module` the rotary positions of `wanted`, which has the same modules and may have no values
    (device "meta"): the frequencies in place, as compiled code and engines hold them, and the configs that exports
    write."""
    for name, part in wanted.named_modules():
        if isinstance(part, PreTrainedModel):
            _model(module, name).config.rope_parameters = part.config.rope_parameters
        frequencies = [each for each, _ in part.named_buffers(recurse=False) if each.endswith(FREQUENCIES)]
        if frequencies:
            computed = type(part)(part.config)  # on the CPU: `part` has no values
            with torch.no_grad():
                for each in frequencies:
                    module.get_submodule(name).get_buffer(each).copy_(computed.get_buffer(each))


def _model(module: nn.Module, name: str) -> PreTrainedModel:
    model = module.get_submodule(name)
    assert isinstance(model, PreTrainedModel)
    return model
