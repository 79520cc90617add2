"""Checks of optimizers, schedules and exporters. Importers, trackers and launchers need other machines, services or
files: only their settings and methods are checked."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from terakoya.components import Exporter, Optimizer, Schedule
from terakoya.components.progress import Progress, Unit
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.toolkit.architectures import attention
from terakoya_contract import objective, toy
from terakoya_contract.results import Check, CheckFailed, CheckSkipped
from terakoya_contract.settings import Case
from terakoya_contract.sharded_optimizer import check_shards

# ------------------------------------------------------------------------------------------------------ optimizers


def _build_optimizer(case: Case, module: nn.Module) -> torch.optim.Optimizer:
    optimizer = case.settings_of(Optimizer).build(module, fused=False)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckFailed(f"build returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    return optimizer


def _build_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def _loss(module: nn.Module) -> torch.Tensor:
    ids = torch.arange(9)
    return ((module(ids).flatten() - torch.sin(ids.float())) ** 2).mean()


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = _loss(module)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_parameter_groups(case: Case) -> None:
    """It updates each trainable weight once, and no frozen one, at its learning rate."""
    module = _build_network()
    module[0].requires_grad_(False)
    optimizer = _build_optimizer(case, module)
    grouped = [id(each) for group in optimizer.param_groups for each in group["params"]]
    trainable = {id(each) for each in module.parameters() if each.requires_grad}
    if len(grouped) != len(set(grouped)) or set(grouped) != trainable:
        raise CheckFailed(
            f"it updates {len(grouped)} tensors, of which {len(trainable & set(grouped))} are among the "
            f"{len(trainable)} trainable ones; its groups must hold every tensor with requires_grad once"
        )
    rate = case.settings_of(Optimizer).learning_rate
    other_rates = [group["lr"] for group in optimizer.param_groups if group["lr"] != rate]
    if other_rates:
        raise CheckFailed(
            f"a group's lr is {other_rates[0]}, expected learning_rate, which is {rate}: the schedule multiplies it"
        )


def check_loss_decreases(case: Case) -> None:
    """It lowers a loss."""
    module = _build_network()
    losses = _train(module, _build_optimizer(case, module), 60)
    if not losses[-1] < losses[0]:
        raise CheckFailed(
            f"after 60 steps at its default learning rate the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"
        )


def check_resuming(case: Case) -> None:
    """Saved and loaded, it continues bit for bit."""
    module = _build_network()
    optimizer = _build_optimizer(case, module)
    _train(module, optimizer, 5)
    restored_module = _build_network()
    restored_module.load_state_dict(module.state_dict())
    restored = _build_optimizer(case, restored_module)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if _train(module, optimizer, 5) != _train(restored_module, restored, 5):
        raise CheckFailed("after load_state_dict its steps differ; keep all of its state in optimizer.state")


# ------------------------------------------------------------------------------------------------------- schedules

UNITS: tuple[Unit, ...] = get_args(Unit)


def check_factors(case: Case) -> None:
    """Its factor is a finite number, never negative, and depends on the progress alone."""
    schedule = case.settings_of(Schedule)
    for unit, max_steps in product(UNITS, (1, 2, 1000)):
        validation = tuple((step, 3.0 - step / max_steps) for step in range(0, max_steps + 1, 2))
        run = [_progress(step, max_steps, unit, validation) for step in range(max_steps + 1)]
        factors = [schedule.factor(progress) for progress in run]
        for step, factor in enumerate(factors):
            if not isinstance(factor, int | float) or not math.isfinite(factor) or factor < 0:
                raise CheckFailed(f"in step {step} of {max_steps} its factor is {factor!r}, expected a number >= 0")
        if factors[::-1] != [schedule.factor(progress) for progress in reversed(run)]:
            raise CheckFailed(
                "called again for the same progress it returns another factor; a resumed run starts in the middle"
            )
        if not any(factors[:max_steps]):
            raise CheckFailed(f"all {max_steps} steps have factor 0: nothing is learnt")


def _progress(step: int, max_steps: int, unit: Unit, validation: tuple[tuple[int, float], ...]) -> Progress:
    """The progress before step `step` of a run of `max_steps` steps of 1,000 tokens, with a validation before every
    second step, of which the whole run's are given."""
    return Progress(
        step=step,
        max_steps=max_steps,
        tokens=1000 * step,
        max_tokens=1000 * max_steps,
        unit=unit,
        learning_rate=1e-3,
        validation=validation[: step // 2 + 1],
    )


# ------------------------------------------------------------------------------------------------------- exporters


def check_export(case: Case) -> None:
    """It writes every model and the tokenizer into the folder it is given."""
    exporter = case.settings_of(Exporter)
    try:
        exporter.check()
    except UserError as error:
        raise CheckSkipped(f"it cannot write here: {error}") from error
    refusals = []
    for name in registry().names("objectives"):
        trained = objective.ObjectiveCase("objectives", name, registry().component("objectives", name))
        try:
            return _check_written_files(exporter, trained.objective.exports(trained.module))
        except UserError as error:
            refusals.append(f"\n  of {name}: {error}")
    raise CheckSkipped("it accepts no model of an installed objective" + "".join(refusals))


def _check_written_files(exporter: Exporter, models: Mapping[str, PreTrainedModel]) -> None:
    before = {name: {key: value.clone() for key, value in model.state_dict().items()} for name, model in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, out = toy.make_tokenizer(Path(folder) / "tokenizer"), Path(folder) / "out"
        tokenizer_files = sorted(tokenizer.iterdir())
        out.mkdir()
        for model in models.values():
            attention.use(model, "sdpa")
        exporter.export(models, tokenizer, out)
        if not any(path.is_file() for path in out.rglob("*")):
            raise CheckFailed("export wrote nothing into the folder it was given")
        if sorted(tokenizer.iterdir()) != tokenizer_files or len(list(Path(folder).iterdir())) != 2:
            raise CheckFailed("export wrote outside the folder it was given")
    for name, model in models.items():
        if any(not torch.equal(value, before[name][key]) for key, value in model.state_dict().items()):
            raise CheckFailed("export changed the weights of the model")


OPTIMIZER: tuple[Check, ...] = (check_parameter_groups, check_loss_decreases, check_resuming, check_shards)
SCHEDULE: tuple[Check, ...] = (check_factors,)
EXPORTER: tuple[Check, ...] = (check_export,)
