"""A Transformers model built from weights of another program: every weight is placed, or an error names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from terakoya.components.copy_weights import join_names as join_names
from terakoya.errors import UserError
from terakoya.toolkit.formats import model_folder


def build_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, weights: Mapping[str, Tensor], source: Path
) -> PreTrainedModel:
    """Returns a model of class `kind` that holds `weights`, in their own dtype; no weight is randomly initialised.
    Weights that the model shares with others (a tied output) may be left out. Raises UserError, which names `source`
    and the weights, if some are missing, unknown or of another shape."""
    with torch.device("meta"):
        model = kind(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    tied = set(model.all_tied_weights_keys) if hasattr(model, "all_tied_weights_keys") else set()
    problems = []
    if lacking := sorted(expected.keys() - found.keys() - tied):
        problems.append(f"lacks {join_names(lacking)}")
    if unknown := sorted(found.keys() - expected.keys()):
        problems.append(f"has weights that {kind.__name__} has no place for: {join_names(unknown)}")
    wrong = [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    if wrong:
        problems.append(f"has weights of another shape: {join_names(wrong)}")
    if problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in problems))
    dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
    model.config.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    own = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    model.load_state_dict(own, strict=False, assign=True)
    model.tie_weights()
    return model


def write_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, weights: Mapping[str, Tensor], source: Path, out: Path
) -> None:
    """Writes `build_model(...)` as a Transformers folder. Raises the same UserError."""
    model_folder.write(build_model(kind, config, weights, source), out)
