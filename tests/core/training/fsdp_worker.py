"""Worlds of several processes that run jobs one after another under `fully_shard`, forked so that nothing is imported
twice. A job is an object:

    out         the run's folder
    settings    the parameter JSON
    start_from  a checkpoint to go on from, or null
    poison      take steps whose gradient is not a number, then one whose is, and write what became of the weights
    gradients   take one step and write, beside its gradients, what each process held
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import toy
from deepspeed_worker import poison
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from terakoya.parameters import Parameters
from terakoya.plugins import PLUGINS_VARIABLE, registry
from terakoya.training import setup
from terakoya.training.distributed import Connection, connect
from terakoya.training.engine import Weigh
from terakoya.training.record import Record
from terakoya.training.resuming import newest_checkpoint, resume
from terakoya.training.stores import Stores
from terakoya.training.trainer import Trainer
from terakoya.training.world import Launched


def fixed_sample(odds: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens that no rounding can change; the right one often enough."""
    drawn = (batch["sample_uniforms"] * odds.shape[1]).long()
    return drawn.where(drawn % 3 != 0, batch["masked_labels"].clamp(min=0))


def start(
    jobs: Sequence[dict[str, Any]], folder: Path, processes: int, *, plugins: Sequence[Path] = ()
) -> list[toy.Process]:
    """Starts a world of `processes` that runs `jobs`, `plugins` loaded; each prints into `folder`."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(processes):
        output = folder / f"{processes}.{rank}.txt"
        launched = {
            "RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank, "WORLD_SIZE": processes,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            PLUGINS_VARIABLE: os.pathsep.join(map(str, plugins)),
        }  # fmt: skip
        process = toy.FORKSERVER.Process(target=work, args=(jobs, launched, output))
        process.start()
        started.append(toy.Process(process, output))
    return started


def work(jobs: Sequence[dict[str, Any]], launched: Mapping[str, Any], output: Path) -> None:
    """One process of a world: runs `jobs` and prints into `output`."""
    os.environ.update({name: str(value) for name, value in launched.items()})
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    connection = connect(Launched.read(), timeout_seconds=60)
    for job in jobs:
        (gradients if job.get("gradients") else train)(job, connection)
    connection.close(failed=False)


def build(job: Mapping[str, Any], connection: Connection) -> Trainer:
    """The trainer of a job, where its run is to go on from."""
    out = Path(job["out"])
    parameters = Parameters.from_dict(job["settings"], source=out.name)
    if connection.is_main:
        (out / "checkpoints").mkdir(parents=True)
        if job.get("start_from"):
            source = Path(job["start_from"])
            shutil.copytree(source, out / "checkpoints" / source.name)
    connection.barrier()
    record = Record(out, [], parameters.dump(), active=connection.is_main)
    folder = newest_checkpoint(out, connection, record)
    stores = Stores.open(parameters)
    trainer = setup.build(parameters, out, stores, connection, record, registry(), fresh=folder is None)
    trainer.run.facts["start"] = time.perf_counter()
    if folder is not None:
        resume(trainer, folder, frozenset())
    return trainer


def train(job: Mapping[str, Any], connection: Connection) -> None:
    """Trains a job to its end, or poisons it."""
    trainer = build(job, connection)
    if job.get("poison"):
        poison(trainer, Path(job["out"]))
    else:
        trainer.train()
    trainer.record.close()


def gradients(job: Mapping[str, Any], connection: Connection) -> None:
    """Writes of the first step `gradients.safetensors`, by name and whole, and `held.json`: the loss, the norm, and by
    rank how many numbers of weights it held and whether it had reduced anything before the last micro-step."""
    out, trainer = Path(job["out"]), build(job, connection)
    engine: Any = trainer.engine
    if hasattr(engine.module, "sample"):
        engine.module.sample = fixed_sample
    whole, early = watch(trainer)
    values = trainer.one_step().values
    assert values is not None
    held = connection.gather([sum(shard.numel() for shard in engine.shards.values()), any(early)])
    if connection.is_main:
        save_file(whole, out / "gradients.safetensors")
        facts = {"loss": values["loss"], "grad_norm": values["grad_norm"], "groups": len(engine.groups), "held": held}
        (out / "held.json").write_text(json.dumps(facts))


def watch(trainer: Trainer) -> tuple[dict[str, Tensor], list[bool]]:
    """Two that fill as `trainer` takes a step: its gradients before they are clipped, and after each micro-step but the
    last whether anything was reduced."""
    engine: Any = trainer.engine
    whole: dict[str, Tensor] = {}
    early: list[bool] = []
    clip, micro_step = engine.clip, engine.micro_step

    def gathered() -> Tensor:
        shapes = {name: value.shape for name, value in engine.module.named_parameters()}
        for name, shard in engine.shards.items():
            assert shard.grad is not None, name
            of = {"shape": shapes[name], "stride": shard.grad.new_empty(shapes[name], device="meta").stride()}
            whole[name] = DTensor.from_local(shard.grad, engine.mesh, [Shard(0)], run_check=False, **of).full_tensor()
        norm: Tensor = clip()
        return norm

    def watched(batch: Mapping[str, Tensor], weigh: Weigh, *, last: bool) -> Mapping[str, Tensor]:
        sums: Mapping[str, Tensor] = micro_step(batch, weigh, last=last)
        values = [*engine.shards.values(), *engine.module.parameters()]
        early.append(not last and any(value.grad is not None for value in values))
        return sums

    engine.clip, engine.micro_step = gathered, watched
    return whole, early
