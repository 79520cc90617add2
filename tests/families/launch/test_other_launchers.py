"""Runs under the launchers of other projects: torchrun, `accelerate launch` and `deepspeed`, on gloo.

Nodes are launchers with ranks of their own on this machine; a run goes on under one launcher after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya_launch.accelerate_requests import read_requests

pytestmark = pytest.mark.usefixtures("forks")
TABLE = {"0": 7, "1": 5, "2": 4}
STEPS = 2
"""Steps under each launcher."""

Words = Callable[[Path, int, str], Sequence[str]]
"""The words before `-m terakoya` of a launcher: of a folder for its files, the rank of its node, and a free port."""


@dataclass
class Launcher:
    """A launcher on `nodes` nodes, and what a run under it says and has besides."""

    words: Words
    nodes: int = 1
    processes: int = 1
    parallel: Mapping[str, Any] = field(default_factory=lambda: {"engine": "ddp"})
    says: str = ""


def torchrun(nodes: int, processes: int) -> Launcher:
    def words(folder: Path, node: int, port: str) -> Sequence[str]:
        return (
            "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node",
            str(processes), "--master-addr", "127.0.0.1", "--master-port", port, "-m",
        )  # fmt: skip

    return Launcher(words, nodes, nodes * processes)


def accelerate(kind: str, nodes: int, processes: int, says: str = "", started: int | None = None, **more: Any) -> Any:
    """accelerate's launcher with a configuration file; `more` are its keys, and `parallel` of the run."""
    parallel = more.pop("parallel", {"engine": "ddp"})
    config = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "mixed_precision": "no", "use_cpu": False,
        "num_machines": nodes, "num_processes": processes, "machine_rank": 0, "same_network": True,
        "rdzv_backend": "static", "main_process_ip": "127.0.0.1", **more,
    }  # fmt: skip

    def words(folder: Path, node: int, port: str) -> Sequence[str]:
        file = folder / f"{kind}-{nodes}-{processes}.yaml"
        file.write_text(json.dumps(config))
        where = ("--config_file", str(file), "--machine_rank", str(node), "--main_process_port", port)
        return "accelerate.commands.launch", *where, "-m"

    return Launcher(words, nodes, processes if started is None else started, parallel, says)


def deepspeed(nodes: int, processes: int, **parallel: Any) -> Launcher:
    def words(folder: Path, node: int, port: str) -> Sequence[str]:
        hosts = folder / "hostfile"
        hosts.write_text("".join(f"a{each:02} slots={processes}\n" for each in range(nodes)))
        of_nodes = ("--hostfile", str(hosts), "--no_ssh", "--node_rank", str(node), "--master_addr", "127.0.0.1")
        which = of_nodes if nodes > 1 else ("--num_gpus", str(processes))
        return "deepspeed.launcher.runner", *which, "--master_port", port, "--module"

    return Launcher(words, nodes, nodes * processes, parallel or {"engine": "ddp"})


def zero(stage: int) -> dict[str, Any]:
    return {"engine": "deepspeed", "zero_stage": stage}


def deepspeed_config(stage: int) -> dict[str, Any]:
    """accelerate's section, and the run's."""
    own = {"zero_stage": stage, "gradient_accumulation_steps": 1, "deepspeed_multinode_launcher": "standard"}
    return {"deepspeed_config": own, "parallel": zero(stage)}


FSDP = {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}
ONE_STARTED = "has started one, as it does with --cpu"
LAUNCHERS: dict[str, Launcher] = {
    "accelerate, one process": accelerate("NO", 1, 1),
    "torchrun, three nodes": torchrun(3, 1),
    "accelerate, one process of two": accelerate("NO", 1, 2, ONE_STARTED, 1, use_cpu=True),
    "accelerate, two processes": accelerate("MULTI_GPU", 1, 2),
    "deepspeed, three nodes": deepspeed(3, 1),
    "accelerate, three nodes": accelerate("MULTI_GPU", 3, 3),
    "accelerate, ZeRO 1": accelerate("DEEPSPEED", 1, 1, **deepspeed_config(1)),
    "accelerate, ZeRO 2": accelerate("DEEPSPEED", 1, 2, **deepspeed_config(2)),
    "deepspeed, ZeRO 3": deepspeed(1, 2, **zero(3)),
    "accelerate, FSDP": accelerate("FSDP", 1, 2, **FSDP, parallel={"engine": "fsdp"}),
    "accelerate, ZeRO 3, three nodes": accelerate("DEEPSPEED", 3, 3, **deepspeed_config(3)),
    "accelerate, FSDP that is not done": accelerate(
        "FSDP", 1, 2, "--set parallel.engine=fsdp --set precision=bf16", **FSDP, mixed_precision="bf16"
    ),
}  # fmt: skip


def start(launcher: Launcher, settings: Mapping[str, Any], out: Path) -> tuple[list[int], str]:
    """Trains under `launcher`; returns the exit code of each node's launcher and what all printed."""
    file, port, started = out.with_suffix(".json"), str(toy.free_port()), []
    file.write_text(json.dumps(settings))
    for node in range(launcher.nodes):
        ours = ("terakoya", "train", file, "--out", out)
        command = (sys.executable, "-m", *launcher.words(out.parent, node, port), *ours)
        printed = out.parent / f"node{node}.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with printed.open("wb") as stream:
            started.append((subprocess.Popen(command, stdout=stream, stderr=stream, env=environment), printed))
    codes = [process.wait(timeout=600) for process, _ in started]
    return codes, "\n---\n".join(printed.read_text(errors="replace") for _, printed in started)


def train_under(names: Sequence[str], store: Path, folder: Path) -> None:
    """Trains `STEPS` steps under each launcher, one after the other, and compares losses with those of one process."""
    base = toy.parameters(store, schedule={"type": "constant"}, micro_batch_size=None, checkpoint={"save_steps": STEPS})
    base["architecture"] = toy.without_dropout(base["architecture"])
    toy.train({**base, "max_steps": STEPS * len(names)}, folder / "reference")
    expected, wrong = toy.losses(folder / "reference"), []
    for number, name in enumerate(names, 1):
        launcher, out = LAUNCHERS[name], folder / "run"
        table = TABLE if launcher.nodes == 3 else {"-1": 16}
        parallel = dict(launcher.parallel)
        settings = {**base, "batch_size": table, "parallel": parallel, "max_steps": STEPS * number}
        codes, printed = start(launcher, settings, out)
        assert set(codes) == {0}, f"{name}: {codes}\n{printed}"
        assert launcher.says in " ".join(printed.split()), f"{name}: {printed}"
        assert ("accelerate's configuration" in printed or ONE_STARTED in printed) == bool(launcher.says), printed
        started = json.loads(max((out / "checkpoints").iterdir()).joinpath("manifest.json").read_bytes())["world"]
        assert started["processes"] == launcher.processes, name
        steps = range(STEPS * (number - 1) + 1, STEPS * number + 1)
        found = toy.losses(out)
        wrong += [(name, step) for step in steps if found[step] != pytest.approx(expected[step], rel=1e-5)]
    assert not wrong


def test_a_run_goes_on_under_another_launcher(store: Path, tmp_path: Path) -> None:
    train_under(["accelerate, one process of two", "deepspeed, three nodes"], store, tmp_path)


@pytest.mark.nightly
def test_a_run_goes_on_under_every_launcher(store: Path, tmp_path: Path) -> None:
    train_under(list(LAUNCHERS), store, tmp_path)


def test_what_accelerate_is_asked_for_is_read_by_our_keys() -> None:
    plain = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "false"}
    assert read_requests(plain) == {}
    assert read_requests({
        **plain, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }) == {
        "parallel.engine": "deepspeed", "parallel.zero_stage": 2, "parallel.offload_optimizer_device": "cpu",
        "precision": "bf16",
    }  # fmt: skip
    sizes = {"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_CP_SIZE": "1"}
    sharded = {**plain, "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true", **sizes}
    assert read_requests(sharded) == {"parallel.engine": "fsdp", "parallel.tp_size": 2}
