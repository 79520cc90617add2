"""Runs that are stopped again and again, at any instant, or run in unkind surroundings: nothing is lost or changed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.training.setup import train_in_this_process

SURROUNDINGS = [Path(__file__).parents[2] / "helpers/surroundings.py"]


def steps_saved(out: Path) -> int:
    return max((int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")), default=0)


def handles_sigterm(process: toy.Process) -> bool:
    """Whether the process has come so far: before, a signal ends it as it ends every program."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    caught = next(line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "times"),
    [
        ((1,), 2),
        pytest.param((1,), 12, marks=pytest.mark.nightly),
        pytest.param((1, 1), 10, marks=pytest.mark.nightly),
    ],
)
def test_a_run_preempted_again_and_again_loses_no_step(
    nodes: tuple[int, ...], times: int, store: Path, tmp_path: Path
) -> None:
    """The signal comes at random instants, also while a start loads its checkpoint."""
    table = {"0": 9, "1": 7} if len(nodes) > 1 else {"-1": 16}
    settings = toy.parameters(store, batch_size=table, max_steps=20 * times, checkpoint={"save_steps": 10_000})
    draw, saved, seen = random.Random(4), 0, set()
    environment = {"STEP_SECONDS": "0.05"}
    for number in range(times):
        started = toy.start(settings, tmp_path / "cut", nodes=nodes, plugins=SURROUNDINGS, environment=environment)
        while not all(map(handles_sigterm, started)):
            time.sleep(0.01)
        time.sleep(0.0 if number == 0 else draw.uniform(0.0, 3.0))
        for each in started:
            with contextlib.suppress(ProcessLookupError):  # the run has finished
                os.kill(each.pid, signal.SIGTERM)
        for each in started:
            each.process.join(60)
        codes = {each.process.exitcode for each in started}
        printed = [each.output.read_text() for each in started]
        assert codes == {75} or codes == {0}, (codes, printed)
        seen.add("during start-up" in printed[0])
        assert steps_saved(tmp_path / "cut") >= saved
        saved = steps_saved(tmp_path / "cut")
        if codes == {0}:
            break
    assert True in seen, "one signal came during start-up"
    toy.train(settings, tmp_path / "cut", nodes=nodes, plugins=SURROUNDINGS)
    toy.train(settings, tmp_path / "straight", nodes=nodes, plugins=SURROUNDINGS)
    assert toy.losses(tmp_path / "cut") == toy.losses(tmp_path / "straight")


@pytest.mark.slow
def test_two_presses_of_ctrl_c_say_what_happens(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=1000, checkpoint={"save_steps": 1000})
    (run,) = toy.start(settings, tmp_path / "run", plugins=SURROUNDINGS, environment={"STEP_SECONDS": "4"})
    try:
        await_output(run, "step 1/1,000")
        os.kill(run.pid, signal.SIGINT)
        await_output(run, "SIGINT: saving after this step")
        time.sleep(1.1)
        os.kill(run.pid, signal.SIGINT)
        run.process.join(20)
        text = run.output.read_text()
        assert "left without saving: 1 step lost, there is no checkpoint yet; the same command begins again" in text
        assert run.process.exitcode == 130 and "Traceback" not in text
        assert not steps_saved(tmp_path / "run")
    finally:
        run.process.kill()


def await_output(run: toy.Process, text: str) -> None:
    deadline = time.monotonic() + 60
    while not run.output.exists() or text not in run.output.read_text():
        assert run.running() and time.monotonic() < deadline, run.output.read_text()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_one_process_saves_on_other_signals_too(number: signal.Signals, store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=100_000, checkpoint={"save_steps": 100_000})
    (run,) = toy.start(settings, tmp_path / "run")
    await_output(run, "step 1/100,000")
    os.kill(run.pid, number)
    text = toy.finish([run], code=75)
    assert f"{number.name}: saving after this step" in text and f"stopped by {number.name} at step" in text
    assert steps_saved(tmp_path / "run") > 0


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run resumes from its last step although files of earlier steps look younger."""
    schedule = {"type": "constant", "warmup_steps": 4}  # one whose steps do not depend on how long the run is
    settings = toy.parameters(store, max_steps=8, schedule=schedule, checkpoint={"save_steps": 2, "keep": 4})

    def train(name: str, **changes: Any) -> None:
        parameters = Parameters.from_dict({**settings, **changes}, source="test")
        train_in_this_process(parameters, tmp_path / name)

    train("straight")
    real, draw = time.time, random.Random(3)
    monkeypatch.setattr(time, "time", lambda: real() + draw.uniform(-1e9, 1e9))
    train("jumps", max_steps=4)
    for age, folder in enumerate(sorted((tmp_path / "jumps/checkpoints").iterdir())):
        os.utime(folder / "manifest.json", (age, 1e9 - 1e6 * age))
    train("jumps")
    assert toy.losses(tmp_path / "jumps") == toy.losses(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [(1,), (1, 1)])
def test_a_run_needs_few_open_files(nodes: tuple[int, ...], store: Path, tmp_path: Path) -> None:
    table = {"0": 9, "1": 7} if len(nodes) > 1 else {"-1": 16}
    settings = toy.parameters(store, batch_size=table)
    toy.train(settings, tmp_path / "run", nodes=nodes, plugins=SURROUNDINGS, environment={"OPEN_FILES": "64"})
    assert steps_saved(tmp_path / "run") == 12


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, for a mount")
def test_a_run_of_two_processes_needs_no_shared_memory(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store, max_steps=3)))
    train = f"{sys.executable} -m terakoya train {file} --out {tmp_path / 'run'} --processes 2"
    small = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && {train}"
    done = subprocess.run(["unshare", "-m", "bash", "-c", small], capture_output=True, text=True, timeout=240)
    if "mount" in done.stderr and not (tmp_path / "run").exists():
        pytest.skip(f"mounts are not allowed here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert steps_saved(tmp_path / "run") == 3
