"""One process of a world that runs several jobs of `worlds` one after another, so that DeepSpeed is imported once.

A job with `poison` takes one step whose gradient is not a number, then one
whose is, and writes what became of the weights; one with `watch` writes what each process gathered and wrote for its
checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import toy
import worlds

from terakoya.training.batches import to_device
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.distributed.context import DistributedContext, connect
from terakoya.training.distributed.topology import LaunchInfo
from terakoya.training.engines.tensor_shards import KINDS
from terakoya.training.trainer import Trainer
from terakoya_parallel import deepspeed_setup


def run(job: dict[str, Any], context: DistributedContext) -> None:
    """Trains one job to its end."""
    out = Path(job["out"])
    trainer = worlds.trainer(job, context)
    if context.is_main and trainer.parameters.parallel.engine == "deepspeed":  # what it says itself that it does
        told = trainer.engine.wrapped._config.zero_config  # type: ignore[attr-defined]
        (out / "zero.json").write_text(told.model_dump_json(by_alias=True))
    if job.get("poison"):
        poison(trainer, out)
    elif job.get("watch"):
        watch(trainer, out)
    else:
        trainer.train()
    trainer.run_log.close()


def watch(trainer: Trainer, out: Path) -> None:
    """Trains, and writes `watched.json`: of each process how many weights were gathered while it wrote its part of the
    checkpoints, and the sizes, by name, of the parts of weights that it wrote last."""
    import deepspeed

    write, gather = checkpoint_state.write, deepspeed.zero.GatheredParameters.__enter__
    writing, gathered, sizes = [False], [0], dict[str, int]()

    def counted(self: Any) -> Any:
        gathered[0] += writing[0]
        return gather(self)

    def watched(folder: Path, rank: int, owner: Any) -> Any:
        writing[0] = True
        try:
            sizes.update({piece.name: piece.value.numel() for piece in owner.shards_to_save("model")})
            return write(folder, rank, owner)
        finally:
            writing[0] = False

    checkpoint_state.write, deepspeed.zero.GatheredParameters.__enter__ = watched, counted
    try:
        trainer.train()
    finally:
        checkpoint_state.write, deepspeed.zero.GatheredParameters.__enter__ = write, gather
    found = trainer.context.gather({"gathered": gathered[0], "sizes": sizes})
    if trainer.context.is_main:
        (out / "watched.json").write_text(json.dumps(found))


def poison(trainer: Trainer, out: Path) -> None:
    """Writes `poison.json`: norms and whether weights and optimizer stayed, of a bad step and of a good one."""
    engine, run = trainer.engine, trainer.run

    def values() -> dict[str, torch.Tensor]:
        pieces = [piece for kind in KINDS for piece in engine.shards_to_save(kind)]
        return {f"{piece.name} {piece.start}": piece.value.clone() for piece in pieces}

    found = []
    for factor in (float("nan"), float("inf"), 1.0):
        rows = trainer.batches.loader.load(0, 2)
        batch = to_device(run.objective.collate(rows, run.vocabulary), run.device, flash=False)
        before = values()
        for micro in range(2):
            # one process of the world meets the bad number, in the first of two micro-steps
            bad = factor if micro == 0 and run.rank == run.world_size - 1 else 1.0
            engine.micro_step(batch, lambda sums, bad=bad: sums["mlm_loss"] * (0.001 * bad), last=micro == 1)
        norm = float(engine.step(0.01))
        after = values()
        stayed = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        found.append({"finite": norm - norm == 0.0, "stayed": all(run.context.gather(stayed))})
    if run.rank == 0:
        (out / "poison.json").write_text(json.dumps(found))


def process(jobs: Sequence[dict[str, Any]], variables: Mapping[str, str], output: Path) -> None:
    """One forked process of the world, with the `variables` of a launcher; prints into `output`."""
    toy.become(variables, output)
    torch.set_num_threads(1)
    run_all(jobs)


def run_all(jobs: Sequence[dict[str, Any]]) -> None:
    """Joins the world and runs the jobs."""
    deepspeed_setup.PERSISTENCE_THRESHOLD = 0  # toy parameters too are cut up
    context = connect(LaunchInfo.from_environment(), timeout_seconds=60)
    before = dict(os.environ)
    for job in jobs:
        run(job, context)
    left = os.environ.items() ^ before.items()
    assert not left, f"variables were left behind: {left}"
    assert "torch._inductor.compile_fx" not in sys.modules, "torch's compiler takes seconds to import"
    context.close(waits=True)


if __name__ == "__main__":  # one process that is not forked, whose imports too may say something
    run_all(json.loads(Path(sys.argv[1]).read_text()))
