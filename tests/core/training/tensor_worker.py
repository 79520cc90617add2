"""One process of a world that trains several runs one after another, in replicas of several processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import toy

from terakoya.parameters import Parameters
from terakoya.plugins import registry
from terakoya.training import setup
from terakoya.training.distributed import Connection, _groups, connect
from terakoya.training.distributed_tensor import TensorParallelEngine
from terakoya.training.record import Record
from terakoya.training.resuming import newest_checkpoint, resume
from terakoya.training.stores import Stores
from terakoya.training.trainer import Trainer
from terakoya.training.world import Launched

Job = Mapping[str, Any]
"""A run: `out`, its folder; `settings`, the parameter JSON; `start_from`, a checkpoint to go on from, or None;
`poison`, whether to take steps whose gradient is not a number, and to write what became of the weights."""


def world(jobs: Sequence[Job], folder: Path, processes: int) -> None:
    """Runs `jobs` in `processes` processes, two on each node, and waits for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(processes):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2),
            "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        output = folder / f"world{processes}.{rank}.txt"
        process = toy.FORKSERVER.Process(target=work, args=(list(jobs), environment, output))
        process.start()
        started.append(toy.Process(process, output))
    toy.finish(started, seconds=400.0)


def work(jobs: Sequence[Job], environment: Mapping[str, str], output: Path) -> None:
    """Runs `jobs`, printing into the file `output`."""
    os.environ.update(environment)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    torch.set_num_threads(1)
    connection = connect(Launched.read(), timeout_seconds=60)
    for job in jobs:
        run(job, connection)
    connection.close(failed=False)


def run(job: Job, connection: Connection) -> None:
    """Trains one job to its end; writes `alike.json`, how many different values each weight has over the processes."""
    out = Path(job["out"])
    parameters = Parameters.from_dict(job["settings"], source=out.name)
    connection = replace(
        connection, topology=replace(connection.topology, replica_size=parameters.parallel.replica_size)
    )
    connection.within, connection.across = _groups(connection.topology, connection.rank, timedelta(seconds=60))
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
        resume(trainer, folder, frozenset({"parallel", "batch_size"}))
    if job.get("poison"):
        poison(trainer, out)
    else:
        trainer.train()
        write_alike(trainer, out)
    record.close()


def write_alike(trainer: Trainer, out: Path) -> None:
    """Writes `alike.json`: name -> `whole` and how many different values it has over all processes, and whether those
    at one place of their replicas have the same."""
    engine, connection = trainer.engine, trainer.run.connection
    assert isinstance(engine, TensorParallelEngine)
    mine = {
        name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
        for name, value in engine.module.named_parameters()
    }
    every = connection.gather(mine)
    size = connection.topology.replica_size
    found = {
        name: {
            "whole": name not in engine.cuts,
            "values": len({each[name] for each in every}),
            "replicas": all(each[name] == every[rank % size][name] for rank, each in enumerate(every)),
        }
        for name in mine
    }
    if connection.is_main:
        (out / "alike.json").write_text(json.dumps(found))


def poison(trainer: Trainer, out: Path) -> None:
    """Writes `poison.json`: of each process, for two bad steps and a good one, whether the norm was finite and whether
    weights and moments stayed."""
    engine, connection = trainer.engine, trainer.run.connection

    def values() -> dict[str, torch.Tensor]:
        return {name: value.clone() for part in (engine.parameters(), engine.optimizer_state()) for name, value in part}

    found = []
    for factor in (float("nan"), float("inf"), 1.0):
        batch = trainer.batches(trainer.run.step).real[0]
        tensors = setup.to_device(batch, trainer.run.device, flash=False)
        before = values()
        for micro in range(2):
            # a cut weight's gradient on one process, in the first of two micro-steps
            bad = factor if micro == 0 and connection.rank == connection.world_size - 1 else 1.0
            engine.micro_step(tensors, lambda sums: sums["lm_loss"] * 0.001, last=micro == 1)
            if micro == 0:
                weight = next(each for each in engine.parted if each.grad is not None)  # type: ignore[attr-defined]
                weight.grad.mul_(bad)
        norm = float(engine.step(0.01))
        after = values()
        stayed = all(torch.equal(before[name], after[name]) for name in before)
        found.append([norm - norm == 0.0, stayed])
    every = connection.gather(found)
    if connection.is_main:
        (out / "poison.json").write_text(json.dumps(every))
