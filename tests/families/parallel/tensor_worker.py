"""Jobs of `worlds` in replicas of several processes that share layers. One with `poison` takes steps whose gradient is
not a number, and writes what became of the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import worlds
from worlds import Job

from terakoya.training.batches import to_device
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.trainer import Trainer
from terakoya_parallel.engine import ParallelEngine


def work(jobs: Sequence[Job], context: DistributedContext) -> None:
    """Runs `jobs` one after another."""
    for job in jobs:
        run(job, context)


def run(job: Job, context: DistributedContext) -> None:
    """Trains one job to its end; writes `alike.json`, how many different values each weight has over the
    processes, where each of them has all weights or parts of them."""
    out = Path(job["out"])
    context = worlds.in_replicas(job, context)
    trainer = worlds.trainer(job, context)
    if job.get("poison"):
        poison(trainer, out)
    else:
        trainer.train()
        if not trainer.engine.groups and trainer.engine.pipeline is None:  # type: ignore[attr-defined]
            write_alike(trainer, out)
    trainer.run_log.close()


def write_alike(trainer: Trainer, out: Path) -> None:
    """Writes `alike.json`: name -> `whole` and how many different values it has over all processes, and whether those
    at one place of their replicas have the same."""
    engine, context = trainer.engine, trainer.run.context
    assert isinstance(engine, ParallelEngine)
    mine = {
        name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
        for name, value in engine.module.named_parameters()
    }
    every = context.gather(mine)
    size = context.topology.replica_size
    found = {
        name: {
            "whole": "tp" in engine.alike[name],
            "values": len({each[name] for each in every}),
            "replicas": all(each[name] == every[rank % size][name] for rank, each in enumerate(every)),
        }
        for name in mine
    }
    if context.is_main:
        (out / "alike.json").write_text(json.dumps(found))


def poison(trainer: Trainer, out: Path) -> None:
    """Writes `poison.json`: of each process, for two bad steps and a good one, whether the norm was finite and whether
    weights and moments stayed."""
    engine, context = trainer.engine, trainer.run.context

    def values() -> dict[str, torch.Tensor]:
        return {
            name: value.clone() for part in (engine.model_state(), engine.optimizer_state()) for name, value in part
        }

    found = []
    for factor in (float("nan"), float("inf"), 1.0):
        batch = trainer.batches(trainer.run.step).real[0]
        tensors = to_device(batch, trainer.run.device, flash=False)
        before = values()
        for micro in range(2):
            # a cut weight's gradient on one process, in the first of two micro-steps
            bad = factor if micro == 0 and context.rank == context.world_size - 1 else 1.0
            engine.micro_step(tensors, lambda sums: sums["lm_loss"] * 0.001, last=micro == 1)
            if micro == 0:
                weight = next(
                    each
                    for name, each in engine.trained.items()  # type: ignore[attr-defined]
                    if each.grad is not None and "tp" not in engine.alike[name]  # type: ignore[attr-defined]
                )
                weight.grad.mul_(bad)
        norm = float(engine.step(0.01))
        after = values()
        stayed = all(torch.equal(before[name], after[name]) for name in before)
        found.append([norm - norm == 0.0, stayed])
    every = context.gather(found)
    if context.is_main:
        (out / "poison.json").write_text(json.dumps(every))
