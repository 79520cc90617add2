"""A Transformers model from weights that another program named: all of them, each in its place, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from terakoya.errors import UserError
from terakoya.toolkit.formats import model_folder

SHOWN = 8
"""How many names an error lists before it counts the rest."""


def make(
    kind: type[PreTrainedModel], config: PretrainedConfig, weights: Mapping[str, Tensor], source: Path
) -> PreTrainedModel:
    """A model of class `kind` that holds `weights`, in their own dtype; nothing is drawn.

    Weights that the model shares with others (a tied output) may be left out.

    Raises:
        UserError: weights missing, left over or of another shape, by name.
    """
    with torch.device("meta"):
        model = kind(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    tied = set(model.all_tied_weights_keys) if hasattr(model, "all_tied_weights_keys") else set()
    problems = []
    for what, names in (
        ("lacks", sorted(expected.keys() - found.keys() - tied)),
        (f"has weights that {kind.__name__} has no place for:", sorted(found.keys() - expected.keys())),
    ):
        if names:
            problems.append(f"{what} {listed(names)}")
    wrong = [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    if wrong:
        problems.append(f"has weights of another shape: {listed(wrong)}")
    if problems:
        raise UserError("\n".join(f"{source}: {problem}" for problem in problems))
    dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
    model.config.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    own = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    model.load_state_dict(own, strict=False, assign=True)
    model.tie_weights()
    return model


def write(
    kind: type[PreTrainedModel], config: PretrainedConfig, weights: Mapping[str, Tensor], source: Path, out: Path
) -> None:
    """Writes `make(...)` as a Transformers folder. UserError as there."""
    model_folder.write(make(kind, config, weights, source), out)


def listed(names: list[str], shown: int = SHOWN) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
