"""The lock of a run's folder: who holds it, and how to end it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from terakoya.errors import UserError
from terakoya.process_pool import LAUNCHER_VARIABLE
from terakoya.runs.folder import lock_run


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def refusal(tmp_path: Path) -> str:
    handle = lock_run(tmp_path / "run.lock")
    try:
        with pytest.raises(UserError) as refused:
            lock_run(tmp_path / "run.lock")
        return str(refused.value)
    finally:
        os.close(handle)


def test_a_lock_in_use_names_its_holder_and_how_to_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"{tmp_path}: is in use by pid {os.getpid()} on {socket.gethostname()}; "
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    expected = f"wait for it, make it save and end with `kill {os.getpid()}`, or choose another --out"
    assert refusal(tmp_path) == here + expected
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(os.getppid()))
    assert refusal(tmp_path) == here + expected


def test_a_lock_whose_holder_lost_its_launcher_says_so(
    tmp_path: Path, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(gone))
    assert refusal(tmp_path) == (
        f"{tmp_path}: is in use by pid {os.getpid()} on {socket.gethostname()}, whose launcher (pid {gone}) is gone; "
        f"`kill {os.getpid()}` makes it save and end, `kill -9 {os.getpid()}` ends it at once"
    )


def test_a_holder_on_another_host_is_ended_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    handle = lock_run(tmp_path / "run.lock")
    (tmp_path / "run.lock").write_text("pid 12 on a02, started by pid 11")
    with pytest.raises(UserError, match="pid 12 on a02; wait for it, make it save and end with `ssh a02 kill 12`"):
        lock_run(tmp_path / "run.lock")
    os.close(handle)
