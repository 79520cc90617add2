"""Weights of finished models, put back into the module of an objective that exports such models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.errors import UserError

SHOWN = 8
"""How many names of one kind an error lists before it counts the rest."""


def copy_weights(
    module: nn.Module, targets: Mapping[str, PreTrainedModel], models: Mapping[str, PreTrainedModel]
) -> None:
    """Gives `targets`, which are parts of `module`, the weights of `models`, name by name; all of them or none.

    Raises:
        UserError: a line for each model that cannot be set: weights that are one in `module` and differ in `models`,
            or a target that is no part of `module`.
    """
    own = {id(value) for value in module.state_dict(keep_vars=True).values()}
    values: dict[int, tuple[Tensor, Tensor, str]] = {}  # of each tensor of ours: itself, what it becomes, whose that is
    problems = []
    for key, target in targets.items():
        ours, theirs = target.state_dict(keep_vars=True), models[key].state_dict()
        if any(id(value) not in own for value in ours.values()):
            problems.append(
                f"{_called(models[key])}: this model cannot be set: the objective computes it from other weights when "
                "it exports, and its adopt does not say how these follow from it"
            )
            continue
        differing: dict[str, list[str]] = {}
        for name, value in ours.items():
            _, before, origin = values.setdefault(id(value), (value, theirs[name], key))
            if not torch.equal(before, theirs[name]):
                differing.setdefault(origin, []).append(name)
        for origin, names in differing.items():
            problems.append(f"{_called(models[key])}: {listed(names)} {_apart(models[origin], same=origin == key)}")
    if problems:
        raise UserError("\n".join(problems))
    with torch.no_grad():
        for value, becomes, _ in values.values():
            value.copy_(becomes)


def _apart(origin: PreTrainedModel, *, same: bool) -> str:
    if same:
        return "differs from the weight that it is one with in the model"
    return (
        f"and the same in {_called(origin)} are one weight in the model, but they differ; take folders of one and the "
        "same training, or settings of the objective that do not share them"
    )


def _called(model: PreTrainedModel) -> str:
    """The folder that `model` was read from."""
    return model.name_or_path or type(model).__name__


def listed(names: Sequence[str], shown: int = SHOWN) -> str:
    """`names`, of which `shown` are written out and the others counted."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
