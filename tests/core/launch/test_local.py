"""Several processes without a launcher: `terakoya train --processes N`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy

from terakoya.launch.local import run_processes


def start(store: Path, out: Path, **changes: object) -> subprocess.Popen[str]:
    """Starts a run of two processes and waits for its first steps."""
    settings = toy.parameters(store, max_steps=100_000, checkpoint={"save_steps": 100_000}, **changes)
    file = out.parent / "run.json"
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(out), "--processes", "2"]
    process = subprocess.Popen(
        command, text=True, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or not toy.records(out):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.05)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_a_signal_to_the_parent_the_run_saves_and_exits(number: signal.Signals, store: Path, tmp_path: Path) -> None:
    process = start(store, tmp_path / "run")
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75, error
    assert "starting 2 processes on this machine" in error
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert toy.records(tmp_path / "run", "stopped")[step]["reason"] == number.name


@pytest.mark.slow
def test_the_failure_of_one_ends_all(store: Path, tmp_path: Path) -> None:
    process = start(store, tmp_path / "run")
    holder = (tmp_path / "run/run.lock").read_text()  # names rank 0, for which the other then waits
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode not in (0, 75), error


@pytest.mark.slow
def test_exit_codes_are_returned() -> None:
    assert run_processes(["--version"], 2) == 0
    assert run_processes(["no-such-verb"], 2) == 2
