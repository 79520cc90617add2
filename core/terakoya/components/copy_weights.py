"""Copying the weights of finished models into the module of an objective that exports such models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.errors import UserError

MAX_NAMES = 8
"""How many names of one kind an error lists before it counts the rest."""


def copy_weights(
    module: nn.Module, targets: Mapping[str, PreTrainedModel], models: Mapping[str, PreTrainedModel]
) -> None:
    """Copies the weights of `models` into `targets`, which are parts of `module`, name by name; all of them or none.
    Raises UserError, a line for each model that cannot be set: weights that are shared in `module` but differ in
    `models`, or a target that is not a part of `module`."""
    own = {id(value) for value in module.state_dict(keep_vars=True).values()}
    values: dict[int, tuple[Tensor, Tensor, str]] = {}  # id of our tensor -> itself, its new value, that value's model
    problems = []
    for key, target in targets.items():
        ours, theirs = target.state_dict(keep_vars=True), models[key].state_dict()
        if any(id(value) not in own for value in ours.values()):
            problems.append(
                f"{_source(models[key])}: this model cannot be set: the objective computes it from other weights when "
                "it exports, and its load_models does not set those weights from it"
            )
            continue
        differing: dict[str, list[str]] = {}
        for name, value in ours.items():
            _, before, origin = values.setdefault(id(value), (value, theirs[name], key))
            if before is not theirs[name] and not torch.equal(before, theirs[name]):
                differing.setdefault(origin, []).append(name)
        for origin, names in differing.items():
            difference = _difference(models[origin], same=origin == key)
            problems.append(f"{_source(models[key])}: {join_names(names)} {difference}")
    if problems:
        raise UserError("\n".join(problems))
    with torch.no_grad():
        for value, new, _ in values.values():
            value.copy_(new)


def _difference(origin: PreTrainedModel, *, same: bool) -> str:
    if same:
        return "differs from the weight with which the model shares it"
    return (
        f"and the same in {_source(origin)} are one shared weight in the model, but they differ; take folders of the "
        "same training, or settings of the objective that do not share these weights"
    )


def _source(model: PreTrainedModel) -> str:
    """Returns the folder from which `model` was read."""
    return model.name_or_path or type(model).__name__


def join_names(names: Sequence[str], limit: int = MAX_NAMES) -> str:
    """Returns the first `limit` of `names`, separated by commas, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
