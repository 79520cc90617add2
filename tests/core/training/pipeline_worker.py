"""Worlds of forked processes that run several jobs one after another, and write down the gradients of every step.

A job is an object:

    out        the run's folder
    settings   the parameter JSON
    start_from a checkpoint to go on from, or missing
    poison     on this rank every gradient of the first step is no number; missing: none is
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import toy
from safetensors.torch import load_file, save_file

from terakoya.parameters import Parameters
from terakoya.plugins import registry
from terakoya.training import setup
from terakoya.training.distributed import Connection, connect
from terakoya.training.record import Record
from terakoya.training.resuming import newest_checkpoint, resume
from terakoya.training.stores import Stores
from terakoya.training.trainer import Trainer
from terakoya.training.world import Launched

Job = Mapping[str, Any]


def run(jobs: Sequence[Job], processes: int, *, nodes: Sequence[int] | None = None, replica_size: int = 1) -> str:
    """Runs `jobs` in a world of `processes`, or of `nodes[i]` on pretended node i; returns what all printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [(node, local) for node, count in enumerate(nodes or (processes,)) for local in range(count)]
    folder = Path(jobs[0]["out"]).parent
    started = []
    for rank, (node, local) in enumerate(places):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node), "WORLD_SIZE": str(len(places)),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        output = folder / f"world.{port}.{rank}.txt"
        process = toy.FORKSERVER.Process(
            target=_world, args=(list(jobs), environment if len(places) > 1 else {}, replica_size, output)
        )
        process.start()
        started.append(toy.Process(process, output))
    toy.finish(started, seconds=240.0)
    return "\n".join(each.output.read_text() for each in started)


def gradients(out: Path, step: int) -> dict[str, torch.Tensor]:
    """The gradients of `step`, those of all processes; where two have one, the last one's."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(out.glob(f"gradients-{step}.*")):
        found |= load_file(file)
    return found


def _world(jobs: Sequence[Job], environment: Mapping[str, str], replica_size: int, output: Path) -> None:
    """One process of the world."""
    os.environ.update(environment)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    connection = connect(Launched.read(), replica_size=replica_size, timeout_seconds=60)
    for job in jobs:
        _run(job, connection)
    connection.close(failed=False)


def _run(job: Job, connection: Connection) -> None:
    """Trains one job to its end."""
    out = Path(job["out"])
    parameters = Parameters.from_dict(dict(job["settings"]), source=out.name)
    if connection.is_main:
        (out / "checkpoints").mkdir(parents=True)
        if job.get("start_from"):
            source = Path(job["start_from"])
            shutil.copytree(source, out / "checkpoints" / source.name)
    connection.barrier()
    record = Record(out, [], parameters.dump(), active=connection.is_main)
    trainer = setup.build(parameters, out, Stores.open(parameters), connection, record, registry())
    trainer.run.facts["start"] = time.perf_counter()
    folder = newest_checkpoint(out, connection, record)
    if folder is not None:
        resume(trainer, folder, frozenset({"parallel"}))
    _watch(trainer, out, poisoned=job.get("poison") == connection.rank)
    trainer.train()
    record.close()


def _watch(trainer: Trainer, out: Path, *, poisoned: bool) -> None:
    """Lets every step write its gradients down before it clips them."""
    engine = trainer.engine
    clip, micro_step = engine.clip, engine.micro_step

    def watched() -> torch.Tensor:
        found = {name: each.grad.clone() for name, each in engine.named_parameters() if each.grad is not None}
        save_file(found, out / f"gradients-{trainer.run.step}.{trainer.run.rank}")
        return clip()

    def spoilt(batch: Any, weigh: Any, *, last: bool) -> Any:
        bad = poisoned and trainer.run.step == 0
        return micro_step(batch, (lambda sums: weigh(sums) * float("nan")) if bad else weigh, last=last)

    engine.clip, engine.micro_step = watched, spoilt
