"""Several processes without a launcher: `terakoya train --processes N`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import toy
from selection import at_night

from terakoya import process_pool
from terakoya.launch import local
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


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("number", at_night([signal.SIGTERM, signal.SIGINT], always=[signal.SIGINT]))
def test_on_a_signal_to_the_parent_the_run_saves_and_exits(number: signal.Signals, store: Path, tmp_path: Path) -> None:
    process = start(store, tmp_path / "run")
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75, error
    assert "starting 2 processes on this machine" in error
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert toy.records(tmp_path / "run", "stopped")[step]["reason"] == number.name


@pytest.mark.usefixtures("forks")
def test_the_failure_of_one_ends_all(store: Path, tmp_path: Path) -> None:
    process = start(store, tmp_path / "run")
    holder = (tmp_path / "run/run.lock").read_text()  # names rank 0, for which the other then waits
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL, error
    named = "process 0 was ended by signal 9 (SIGKILL)"
    assert named in error and "Traceback" not in error.partition(named)[0]
    assert "rank 0 on" in error.partition(named)[2] and "has not answered since" in error


@pytest.mark.usefixtures("forks")
def test_exit_codes_are_returned_and_processes_speak_the_language_of_their_user(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    assert run_processes(["--version"], 2) == 0
    assert run_processes(["no-such-verb"], 2) == 2
    assert "no-such-verb というコマンドはありません" in capfd.readouterr().err


@pytest.mark.nightly
def test_an_error_that_all_processes_meet_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        assert run_processes(["status", str(tmp_path / "nowhere")], 3) == 2
    assert capfd.readouterr().err.count("error: ") == 1
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/dev/null/no")  # no place to note it
        assert run_processes(["status", str(tmp_path / "nowhere")], 2) == 2
    assert capfd.readouterr().err.count("error: ") == 2


def test_what_another_program_of_the_launcher_has_said_is_no_reason_for_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(process_pool.SAID_VARIABLE, str(tmp_path))
    monkeypatch.setenv(process_pool.LAUNCHER_VARIABLE, str(os.getppid()))
    assert [process_pool.is_said_already(each) for each in ("a", "b", "a")] == [False, False, True]
    monkeypatch.setenv(process_pool.LAUNCHER_VARIABLE, "1")  # started by a process of the run
    assert not process_pool.is_said_already("a")
    monkeypatch.setenv(process_pool.LAUNCHER_VARIABLE, str(os.getppid()))
    monkeypatch.setenv(process_pool.SAID_VARIABLE, str(tmp_path / "gone"))
    assert not process_pool.is_said_already("a")


# What its processes do is a script here: a stand-in for the program.

PARENT = """
import signal, sys
from terakoya.launch import local
local.sys.executable = sys.argv[1]
sys.exit(local.run_processes([], 2))
"""


def stand_in(folder: Path, text: str) -> Path:
    program = folder / "program"
    program.write_text(f"#!/bin/bash\ncd {folder}\n{text}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("number", at_night([signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL], always=[signal.SIGKILL]))
def test_processes_end_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    """They get the signal itself, or SIGTERM when their parent is killed."""
    text = (
        'for each in TERM HUP USR1; do trap "echo $each > end.$RANK; mv end.$RANK ended.$RANK; exit 75" $each; done\n'
        "echo > ready.$RANK\nwhile true; do sleep 0.05; done"
    )
    temporary = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(stand_in(tmp_path, text))], env=temporary)
    wait_for_files(tmp_path, "ready")
    parent.send_signal(number)
    assert parent.wait(timeout=20) == (75 if number != signal.SIGKILL else -signal.SIGKILL)
    wait_for_files(tmp_path, "ended")
    expected = "TERM" if number == signal.SIGKILL else number.name.removeprefix("SIG")
    assert [(tmp_path / f"ended.{rank}").read_text().strip() for rank in (0, 1)] == [expected, expected]


def wait_for_files(folder: Path, name: str) -> None:
    deadline = time.monotonic() + 20
    while not all((folder / f"{name}.{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("codes", "code"),
    [((76, 0), 76), ((76, 3), 3), ((2, 76), 2), ((75, 75), 75), ((0, 0), 0)],
    ids=["lost alone", "lost another that failed", "an error of the user", "stopped", "finished"],
)
def test_the_exit_code_is_that_of_the_cause(
    codes: tuple[int, int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has lost another may end before that one does."""
    text = f"[ $RANK = 0 ] && exit {codes[0]}\nsleep 0.2; exit {codes[1]}"
    monkeypatch.setattr(local.sys, "executable", str(stand_in(tmp_path, text)))
    assert run_processes([], 2) == code


def test_a_process_that_hangs_is_killed_soon_after_another_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOST_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(local.sys, "executable", str(stand_in(tmp_path, "[ $RANK = 0 ] && exit 76\nkill -STOP $$")))
    began = time.monotonic()
    assert run_processes([], 2) == 76
    assert time.monotonic() - began < 10
