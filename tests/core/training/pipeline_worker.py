"""Worlds of forked processes that run several jobs one after another.

A job is an object:

    out        the run's folder
    settings   the parameter JSON
    start_from a checkpoint to go on from, or missing

Each process writes down its gradients of every step, before they are clipped, and the weights it ends with.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import toy
from safetensors.torch import load_file, save_file

from terakoya.parameters import Parameters
from terakoya.plugins import registry
from terakoya.training import setup
from terakoya.training.distributed import Connection, connect
from terakoya.training.distributed_ddp import DDPEngine
from terakoya.training.record import Record
from terakoya.training.resuming import newest_checkpoint, resume
from terakoya.training.stores import Stores
from terakoya.training.trainer import Trainer
from terakoya.training.world import Launched

Job = Mapping[str, Any]


def run(jobs: Sequence[Job], nodes: Sequence[int], *, replica_size: int = 1) -> str:
    """Runs `jobs` in a world with `nodes[i]` processes on pretended node i; returns what all printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
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
    """The gradients of `step`, counted from 0, of all processes."""
    return _merged(sorted(out.glob(f"gradients-{step}.*")))


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The parameters that all processes ended with."""
    return _merged(sorted(out.glob("weights.*")))


def _merged(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The tensors of `files`; of those that several have, all have the same bits."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        for name, value in load_file(file).items():
            assert torch.equal(found.setdefault(name, value).nan_to_num(), value.nan_to_num()), name
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
    _watch(trainer, out)
    trainer.train()
    save_file({name: value.detach() for name, value in _named(trainer)}, out / f"weights.{connection.rank}")
    record.close()


def _named(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    assert isinstance(trainer.engine, DDPEngine)
    return trainer.engine.named_parameters()


def _watch(trainer: Trainer, out: Path) -> None:
    """Lets every step write its gradients down before it clips them."""
    engine: Any = trainer.engine
    clip = engine.clip

    def watched() -> torch.Tensor:
        found = {name: each.grad.clone() for name, each in _named(trainer) if each.grad is not None}
        save_file(found, out / f"gradients-{trainer.run.step}.{trainer.run.rank}")
        norm: torch.Tensor = clip()
        return norm

    engine.clip = watched
