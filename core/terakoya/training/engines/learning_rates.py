"""Optimizers whose groups have learning rates of their own, as shares of that of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from terakoya.components import Optimizer
from terakoya.training.engines.engine import Engine
from terakoya.training.engines.tensor_shards import TensorShard

SHARE = "learning_rate_share"
"""The key of a group that has another learning rate than that of the step: a multiple of it."""


WIDTH_POWER = "width_power"
"""The key of a group whose learning rate follows another power of the width than Adam's: see `Optimizer`."""


def build_optimizer(
    optimizer: Optimizer,
    module: nn.Module,
    shares: Mapping[str, float],
    *,
    fused: bool,
    names: Mapping[int, str] | None = None,
) -> torch.optim.Optimizer:
    """Returns the torch optimizer of `module`, with an attribute `group_of`: name of a parameter -> its group in words.

    Where a group's weights have several `shares`, it becomes several groups. Weight decay is divided by the share: an
    optimizer multiplies it by the learning rate, and a step keeps the same part of the weights in all groups.

    Args:
        shares: name of a parameter -> its learning rate with Adam, as a multiple of the step's; 1 where it has none.
        names: the parameters' names by their ids; those in `module` if not given.
    """
    built = optimizer.build(module, fused=fused)
    found = names if names is not None else {id(value): name for name, value in module.named_parameters()}
    if any(share != 1.0 for share in shares.values()):
        built.param_groups = [part for group in built.param_groups for part in _split(group, shares, found)]
    built.group_of = {found[id(each)]: _settings(group) for group in built.param_groups for each in group["params"]}  # type: ignore[attr-defined]
    return built


def _settings(group: Mapping[str, Any]) -> str:
    """What tells `group` from others in every process: a process may have some of the groups alone."""
    return ", ".join(f"{key} {group[key]}" for key in sorted(group) if key not in ("params", "lr"))


def optimizer_shards(engine: Engine) -> Iterator[tuple[str, TensorShard]]:
    """See `components.run.Run`."""
    for shard in engine.shards_to_save("optimizer"):
        yield engine.optimizer.group_of[shard.name.rpartition("/")[0]], shard  # type: ignore[attr-defined]


def _split(group: dict[str, Any], shares: Mapping[str, float], names: Mapping[int, str]) -> Iterable[dict[str, Any]]:
    """Yields the parts of `group` by their shares, in the order of their first weights."""
    parts: dict[float, list[nn.Parameter]] = {}
    for each in group["params"]:
        share = shares.get(names[id(each)], 1.0) ** group.get(WIDTH_POWER, 1.0)
        parts.setdefault(share, []).append(each)
    for share, params in parts.items():
        decay = {"weight_decay": group["weight_decay"] / share} if "weight_decay" in group else {}
        yield {**group, "params": params, **decay, SHARE: share}


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of each group for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(SHARE, 1.0)
