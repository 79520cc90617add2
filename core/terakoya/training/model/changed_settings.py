"""A model with other settings in the middle of a run: another base of rotary positions, as longer rows need it, or
another window of local attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from terakoya.training.model.module_parts import top_level_models

FREQUENCIES = "inv_freq"
"""How the names of the buffers end that Transformers computes from the base."""
IN_CONFIGS = ("rope_parameters", "sliding_window")
IN_LAYERS = "sliding_window"
"""The attribute that layers with local attention have and the others have as None."""


def change_settings(module: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Gives the models in `module` the rotary positions and windows of those that `build` makes: the frequencies in
    place, as compiled code and engines hold them, and the configs that exports write. The stages of a pipeline each
    have a part of the one model that is built."""
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
        if isinstance(ours, PreTrainedModel):
            for setting in IN_CONFIGS:
                if hasattr(part.config, setting):
                    setattr(ours.config, setting, getattr(part.config, setting))
        if IN_LAYERS in vars(part):
            setattr(ours, IN_LAYERS, getattr(part, IN_LAYERS))
        frequencies = [each for each, _ in part.named_buffers(recurse=False) if each.endswith(FREQUENCIES)]
        if frequencies:
            computed = type(part)(part.config)  # on the CPU: `part` has no values
            with torch.no_grad():
                for each in frequencies:
                    ours.get_buffer(each).copy_(computed.get_buffer(each))
