"""One process of a world that takes the first step of several runs, and writes down gradients and sums."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.rows.stores import Stores
from terakoya.training import setup
from terakoya.training.run_log import RunLog
from terakoya.training.validation import validate


def work(jobs: Mapping[str, Any], folder: Path, context: DistributedContext) -> None:
    """Runs `jobs`, name -> parameter JSON, one after another."""
    for name, settings in jobs.items():
        first_step(settings, folder, name, context)


def first_step(settings: Mapping[str, Any], folder: Path, name: str, context: DistributedContext) -> None:
    """Validates, then takes the first step. Writes of each process NAME.RANK.safetensors, the gradients after they were
    reduced, and NAME.RANK.json: what is reported of the step, and of the validation; both are global."""
    parameters = Parameters.from_dict(settings, source=name)
    stores = Stores.open(parameters.data)
    run_log = RunLog(folder, [], {}, active=False)
    trainer = setup.build_trainer(parameters, folder, stores, context, run_log)
    engine, objective = trainer.engine, parameters.objective
    step = engine.step
    gradients: dict[str, torch.Tensor] = {}

    def watched(learning_rate: float, **options: float) -> torch.Tensor:
        for each, parameter in engine.module.named_parameters():
            assert parameter.grad is not None
            gradients[each] = parameter.grad.clone()
        return step(learning_rate, **options)

    engine.step = watched  # type: ignore[method-assign]
    validations: Sequence[Mapping[str, float]] = [
        validate(engine, context, source, objective, trainer.batches, batches=2)
        for source in trainer.validation.values()
    ]
    report = trainer.one_step()
    save_file(gradients, folder / f"{name}.{context.rank}.safetensors")
    numbers = {
        "dropout_rank": engine.dropout_rank,
        "tokens": report.tokens,
        **dict(report.values or {}),
        "validation": [*validations],
    }
    (folder / f"{name}.{context.rank}.json").write_text(json.dumps(numbers))
