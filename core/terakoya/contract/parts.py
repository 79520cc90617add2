"""What optimizers, schedules and exporters promise. Importers, trackers and launchers reach out of the machine: of them
only settings and methods are looked at."""

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
from terakoya.contract import objective, toy
from terakoya.contract.findings import Check, NotLookedAt, Wrong
from terakoya.contract.settings import Subject
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.toolkit.architectures import attention

# ------------------------------------------------------------------------------------------------------ optimizers


def _optimizer(subject: Subject, module: nn.Module) -> torch.optim.Optimizer:
    settings = subject.settings()
    assert isinstance(settings, Optimizer)
    optimizer = settings.build(module, fused=False)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Wrong(f"build returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    return optimizer


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def _loss(module: nn.Module) -> torch.Tensor:
    ids = torch.arange(9)
    return ((module(ids).flatten() - torch.sin(ids.float())) ** 2).mean()


def _steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = _loss(module)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def takes_every_weight(subject: Subject) -> None:
    """It takes each trainable weight once, and no frozen one, at its learning rate."""
    module = _network()
    module[0].requires_grad_(False)
    optimizer = _optimizer(subject, module)
    taken = [id(each) for group in optimizer.param_groups for each in group["params"]]
    expected = {id(each) for each in module.parameters() if each.requires_grad}
    if len(taken) != len(set(taken)) or set(taken) != expected:
        raise Wrong(
            f"it takes {len(taken)} tensors, of which {len(expected & set(taken))} are among the {len(expected)} that "
            "may be trained; take those with requires_grad, each once"
        )
    settings = subject.settings()
    assert isinstance(settings, Optimizer)
    rate = settings.learning_rate
    wrong = [group["lr"] for group in optimizer.param_groups if group["lr"] != rate]
    if wrong:
        raise Wrong(f"a group's lr is {wrong[0]}, expected learning_rate, which is {rate}: the schedule multiplies it")


def learns(subject: Subject) -> None:
    """It makes a loss smaller."""
    module = _network()
    losses = _steps(module, _optimizer(subject, module), 60)
    if not losses[-1] < losses[0]:
        raise Wrong(
            f"after 60 steps at its default learning rate the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"
        )


def resumes(subject: Subject) -> None:
    """Its state, saved and loaded, goes on to the bit."""
    module = _network()
    optimizer = _optimizer(subject, module)
    _steps(module, optimizer, 5)
    again = _network()
    again.load_state_dict(module.state_dict())
    restored = _optimizer(subject, again)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if _steps(module, optimizer, 5) != _steps(again, restored, 5):
        raise Wrong("after load_state_dict it takes other steps; keep all that it remembers in optimizer.state")


# ------------------------------------------------------------------------------------------------------- schedules

UNITS: tuple[Unit, ...] = get_args(Unit)


def factors(subject: Subject) -> None:
    """Its factor is a finite number, never negative, and depends on the progress alone."""
    schedule = subject.settings()
    assert isinstance(schedule, Schedule)
    for unit, max_steps in product(UNITS, (1, 2, 1000)):
        run = [_progress(step, max_steps, unit) for step in range(max_steps + 1)]
        course = [schedule.factor(progress) for progress in run]
        for step, factor in enumerate(course):
            if not isinstance(factor, int | float) or not math.isfinite(factor) or factor < 0:
                raise Wrong(f"in step {step} of {max_steps} its factor is {factor!r}, expected a number from 0")
        if course[::-1] != [schedule.factor(progress) for progress in reversed(run)]:
            raise Wrong("asked again it gives another factor; a run that resumes asks for steps in the middle")
        if not any(course[:max_steps]):
            raise Wrong(f"of {max_steps} steps every one has factor 0: nothing is learnt")


def _progress(step: int, max_steps: int, unit: Unit) -> Progress:
    """Before step `step` of a run of `max_steps` steps of 1,000 tokens, validated before every second one."""
    return Progress(
        step=step,
        max_steps=max_steps,
        tokens=1000 * step,
        max_tokens=1000 * max_steps,
        unit=unit,
        learning_rate=1e-3,
        validation=tuple((each, 3.0 - each / max_steps) for each in range(0, step + 1, 2)),
    )


# ------------------------------------------------------------------------------------------------------- exporters


def writes(subject: Subject) -> None:
    """It writes every model and the tokenizer below the folder it is given."""
    exporter = subject.settings()
    assert isinstance(exporter, Exporter)
    refusals = []
    for name in registry().names("objectives"):
        trained = objective.Subject("objectives", name, registry().component("objectives", name))
        try:
            return _writes(exporter, trained.objective.exports(trained.module))
        except UserError as error:
            refusals.append(f"\n  of {name}: {error}")
    raise NotLookedAt("it takes no model of an installed objective" + "".join(refusals))


def _writes(exporter: Exporter, models: Mapping[str, PreTrainedModel]) -> None:
    before = {name: {key: value.clone() for key, value in model.state_dict().items()} for name, model in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, out = toy.make_tokenizer(Path(folder) / "tokenizer"), Path(folder) / "out"
        kept = sorted(tokenizer.iterdir())
        out.mkdir()
        for model in models.values():
            attention.use(model, "sdpa")
        exporter.export(models, tokenizer, out)
        if not any(path.is_file() for path in out.rglob("*")):
            raise Wrong("export wrote nothing into the folder it was given")
        if sorted(tokenizer.iterdir()) != kept or len(list(Path(folder).iterdir())) != 2:
            raise Wrong("export wrote beside the folder it was given")
    for name, model in models.items():
        if any(not torch.equal(value, before[name][key]) for key, value in model.state_dict().items()):
            raise Wrong("export changed the weights of the model")


OPTIMIZER: tuple[Check, ...] = (takes_every_weight, learns, resumes)
SCHEDULE: tuple[Check, ...] = (factors,)
EXPORTER: tuple[Check, ...] = (writes,)
