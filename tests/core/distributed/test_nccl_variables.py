"""`parallel.nccl`: the variables are set in the processes before they connect. NCCL itself needs GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy
from accelerate.state import AcceleratorState

from terakoya.config.nccl import Nccl
from terakoya.config.parameters import Parameters
from terakoya.distributed import gpu_allocator, nccl_algorithms
from terakoya.errors import UserError
from terakoya.training import setup
from terakoya_planning import dry_run

SHOW = """\
import json, os
from terakoya import hookimpl

@hookimpl
def step_finished(run, report):
    names = ("NCCL_DEBUG", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    with open(f"{folder}/{{run.rank}}.json", "w") as stream:
        json.dump([os.environ.get(name) for name in names], stream)
"""


def parameters(store: Path, **nccl: Any) -> dict[str, Any]:
    raw = toy.parameters(store, max_steps=1, evaluation=None)
    return {**raw, "parallel": {**raw.get("parallel", {}), "nccl": nccl}}


@pytest.mark.slow
def test_every_process_has_the_variables_and_its_environment_comes_first(store: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "show.py"
    plugin.write_text(SHOW.format(folder=tmp_path))
    settings, out = parameters(store, debug="INFO", flight_recorder=2000), tmp_path / "run"
    own = [{}, {"NCCL_DEBUG": "WARN"}]
    toy.finish(toy.start(settings, out, nodes=(2,), plugins=[plugin], environment_of_rank=own))
    for rank, debug in enumerate(("INFO", "WARN")):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == [debug, "2000", f"{out}/flight_recorder/rank_", "1"]
    assert (out / "flight_recorder").is_dir()


def test_nothing_is_set_that_is_not_asked_for(tmp_path: Path) -> None:
    assert Nccl().variables(tmp_path) == {}
    assert Nccl(heartbeat_seconds=1200).variables(tmp_path) == {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1200"}
    assert Nccl(flight_recorder=1).variables(Path("run"))["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(Path.cwd()))


def test_an_unknown_level_is_refused(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(parameters(store, debug="LOUD")))
    with pytest.raises(UserError, match=r"parallel\.nccl\.debug"):
        Parameters.load(file)


class GroupMade(Exception):
    """What a spy raises in place of a group of two GPUs."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What is known when the group of two processes with a GPU each is made."""
    seen: dict[str, Any] = {}
    AcceleratorState._reset_state(reset_partial_state=True)  # what a run in this process has left

    def make(backend: str | None = None, timeout: timedelta | None = None, **_: Any) -> None:
        seen.update(backend=backend, timeout=timeout, algorithms=nccl_algorithms.read_choice())
        raise GroupMade

    monkeypatch.setattr(dist, "init_process_group", make)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("accelerate.state.check_cuda_p2p_ib_support", lambda: True)
    monkeypatch.setattr(gpu_allocator, "let_segments_grow", lambda: None)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.delenv(name, raising=False)
    yield seen
    os.environ.pop("NCCL_ALGO", None)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("start", [setup.train_in_this_process, dry_run.dry_run], ids=["train", "dry run"])
@pytest.mark.parametrize(
    ("deterministic", "own", "expected"),
    [
        (True, None, {"NCCL_ALGO": "^NVLS,NVLSTree"}),  # switches add up in another order in each call
        (True, "Tree", {"NCCL_ALGO": "Tree"}),
        (False, None, {}),
    ],
)
def test_gpus_sum_in_one_order_from_their_first_group_on(
    start: Any, deterministic: bool, own: str | None, expected: dict[str, str], made: dict[str, Any], store: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if own is not None:
        monkeypatch.setenv("NCCL_ALGO", own)
    settings = toy.parameters(store, deterministic=deterministic, parallel={"timeout_seconds": 100})
    with pytest.raises(GroupMade):
        start(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    assert made["algorithms"] == expected
    # the heartbeat names a rank and ends this process 13 s after the timeout; NCCL's watchdog would kill it first
    assert made["backend"] == "nccl" and made["timeout"] > timedelta(seconds=100 + 13)
