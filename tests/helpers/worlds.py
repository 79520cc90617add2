"""Worlds of forked processes that run several jobs one after another, so that nothing is imported twice: jobs that are
given at the start, or those for which a `World` is asked.

A job is an object:

    out         the run's folder
    settings    the parameter JSON
    start_from  a checkpoint to go on from, or missing

and what else the function that runs it looks for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import toy

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext, connect
from terakoya.distributed.topology import LaunchInfo
from terakoya.plugins import PLUGINS_VARIABLE
from terakoya.rows.stores import Stores
from terakoya.training import setup
from terakoya.training.resuming.resume import newest_checkpoint, resume
from terakoya.training.run_log import RunLog
from terakoya.training.trainer import Trainer
from terakoya_parallel import deepspeed_setup

Job = Mapping[str, Any]


def start(
    work: Callable[[DistributedContext], None],
    nodes: Sequence[int],
    folder: Path,
    *,
    replica_size: int = 1,
    plugins: Sequence[Path] = (),
) -> list[toy.Process]:
    """Starts a world with `nodes[i]` processes on pretended node i, `plugins` loaded: each calls `work` with its
    context and prints into `folder`."""
    folder.mkdir(exist_ok=True)
    variables = toy.launched(nodes)
    loaded = {PLUGINS_VARIABLE: os.pathsep.join(map(str, plugins))} if plugins else {}
    started = []
    for rank, mine in enumerate(variables):
        output = folder / f"world.{len(variables)}.{rank}.{os.urandom(4).hex()}.txt"
        process = toy.fork(_process, work, {**mine, **loaded}, replica_size, output)
        started.append(toy.Process(process, output))
    return started


def _process(
    work: Callable[[DistributedContext], None],
    variables: Mapping[str, str],
    replica_size: int,
    output: Path,
) -> None:
    """One process of a world."""
    toy.become(variables, output)
    torch.set_num_threads(1)
    context = connect(LaunchInfo.from_environment(), replica_size=replica_size, timeout_seconds=60)
    work(context)
    context.close(waits=True)


class World:
    """Processes, `nodes[i]` of them on pretended node i, that wait for jobs until they are closed."""

    def __init__(self, nodes: Sequence[int], folder: Path, *, deepspeed: bool = False) -> None:
        pipes = [toy.FORKSERVER.Pipe() for _ in range(sum(nodes))]
        self.pipes = [mine for mine, _ in pipes]
        self.processes = []
        for (_, theirs), variables in zip(pipes, toy.launched(nodes), strict=True):
            output = folder / f"world.{os.urandom(4).hex()}.txt"
            self.processes.append(toy.Process(toy.fork(_serve, theirs, variables, deepspeed, output), output))
            theirs.close()

    def run(self, work: Callable[[Job, DistributedContext], None], job: Job) -> None:
        """Lets each process do its part of `job`. Fails, and ends them all, where one of them fails."""
        for pipe in self.pipes:
            pipe.send((work, job))
        waiting = set(self.pipes)
        try:
            while waiting:
                ready = connection.wait(waiting, timeout=240)
                assert ready, "the processes wait for something"
                for pipe in ready:
                    assert isinstance(pipe, connection.Connection)
                    pipe.recv()
                    waiting.remove(pipe)
        except (EOFError, ConnectionError, AssertionError) as error:
            for each in self.processes:
                each.process.kill()
            said = "\n---\n".join(each.output.read_text() for each in self.processes)
            raise AssertionError(f"{job['out']}: {error!r}\n{said}") from None

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for each in self.processes:
            each.process.join(60)
            each.process.kill()


def _serve(pipe: connection.Connection, variables: Mapping[str, str], deepspeed: bool, output: Path) -> None:
    """One process of a `World`."""
    toy.become(variables, output)
    torch.set_num_threads(1)
    deepspeed_setup.PERSISTENCE_THRESHOLD = 0  # toy parameters too are cut up
    context = connect(LaunchInfo.from_environment(), timeout_seconds=60)
    before = dict(os.environ)
    while (given := pipe.recv()) is not None:
        work, job = given
        work(job, in_replicas(job, context))
        if deepspeed:
            left = os.environ.items() ^ before.items()
            assert not left, f"variables were left behind: {left}"
            if (
                "bitsandbytes" not in sys.modules
            ):  # which peft imports where it is installed, and which imports the compiler
                assert "torch._inductor.compile_fx" not in sys.modules, "torch's compiler takes seconds to import"
        pipe.send(None)
    context.close(waits=True)


def in_replicas(job: Job, context: DistributedContext) -> DistributedContext:
    """The context with replicas of the size that the job's settings say; of every process."""
    size = Parameters.from_dict(dict(job["settings"]), source="a job").parallel.replica_size
    return replace(context, topology=replace(context.topology, replica_size=size))


def train(jobs: Sequence[Job], context: DistributedContext) -> None:
    """Trains `jobs` to their ends, each under its own engine."""
    for job in jobs:
        made = trainer(job, in_replicas(job, context))
        made.train()
        made.run_log.close()


def trainer(job: Job, context: DistributedContext) -> Trainer:
    """The trainer of a job, where its run is to go on from."""
    out = Path(job["out"])
    parameters = Parameters.from_dict(dict(job["settings"]), source=out.name)
    if context.is_main:
        (out / "checkpoints").mkdir(parents=True)
        if job.get("start_from"):
            source = Path(job["start_from"])
            shutil.copytree(source, out / "checkpoints" / source.name)
    context.barrier()
    run_log = RunLog(out, [], parameters.dump(), active=context.is_main)
    folder = newest_checkpoint(out, context, run_log)
    stores = Stores.open(parameters.data)
    built = setup.build_trainer(parameters, out, stores, context, run_log, fresh=folder is None)
    if folder is not None:
        resume(built, folder, frozenset())
    return built
