"""torchrun as a host's script starts it: what becomes of a wish to stop, and which exit code comes out."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROCESS = """\
import os, signal, sys, time
from pathlib import Path
from terakoya.training.distributed import signals

def ready():
    print("ready", flush=True)

match sys.argv[1]:
    case "heeds":
        with signals.StopRequest() as stop:
            stop.listen()
            ready()
            while stop.signal is None:
                time.sleep(0.01)
        signals.ignore_stop_signals()
        os.kill(os.getpid(), signal.SIGTERM)  # told once more
        sys.exit(signals.exit_code(stopped=True))
    case "hangs":
        with signals.StopRequest() as stop:
            stop.listen()
            ready()
            time.sleep(60)
    case "finishes":
        Path(os.environ[signals.EXIT_CODE_FILE_VARIABLE]).parent.rmdir()  # as who cleans up old folders
        signals.ignore_stop_signals()
        sys.exit(signals.exit_code(stopped=False))
    case "dies":
        ready()
        time.sleep(60)
    case "is killed":
        ready()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    case "is stopped to begin anew":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1 + signals.exit_code(stopped=True))
        with signals.StopRequest() as stop:
            stop.listen()
    case "fails":
        sys.exit(3)
"""
ELASTIC = ("--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=600")


class Agent:
    """One that is started over two processes that do `what`."""

    def __init__(
        self, folder: Path, what: str, *more: str, nodes: int = 1, processes: int = 2, port: str | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = port or str(probe.getsockname()[1])
        file = folder / "process.py"
        file.write_text(PROCESS)
        self.printed = folder / "printed"
        meeting = "--rdzv-backend" in more
        where = ("--rdzv-endpoint", f"127.0.0.1:{port}") if meeting else ("--master-port", port)
        arguments = ("--nnodes", str(nodes), "--nproc-per-node", str(processes), *more, *where, str(file), what)
        with self.printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "terakoya.launch.torchrun_agent", *arguments], stdout=printed, stderr=printed
            )

    def until_ready(self, times: int = 2) -> None:
        """Waits until its processes have said so."""
        deadline = time.monotonic() + 60
        while self.said().count("ready") < times:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def said(self) -> str:
        return self.printed.read_text()

    def end(self) -> tuple[int, str]:
        """Its exit code, and what was printed."""
        try:
            return self.process.wait(timeout=60), self.said()
        finally:
            self.process.kill()


@pytest.mark.parametrize("more", [(), ELASTIC], ids=["once", "with restarts"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_processes_that_were_asked_save_and_that_is_what_it_ends_with(
    number: signal.Signals, more: tuple[str, ...], tmp_path: Path
) -> None:
    agent = Agent(tmp_path, "heeds", *more)
    agent.until_ready()
    agent.process.send_signal(number)
    code, said = agent.end()
    assert code == 75 and "Traceback" not in said and "exitcode" not in said, said


def test_processes_that_did_not_heed_it_are_not_waited_for_when_started_anew(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "dies", *ELASTIC)
    agent.until_ready()
    agent.process.send_signal(signal.SIGTERM)
    code, said = agent.end()
    assert code == 143 and "exited with 143, the first process on this host that failed" in said, said


@pytest.mark.parametrize("more", [ELASTIC, ("--node-rank", "1")], ids=["as the first", "as the second"])
def test_what_waits_for_other_hosts_leaves_at_once(more: tuple[str, ...], tmp_path: Path) -> None:
    agent = Agent(tmp_path, "heeds", *more, nodes=2)
    deadline = time.monotonic() + 60
    while not _heeds(agent.process.pid):
        assert agent.process.poll() is None and time.monotonic() < deadline, agent.said()
        time.sleep(0.05)
    time.sleep(4.0)  # until torch is there
    agent.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert agent.end()[0] == 143
    assert time.monotonic() - began < 5


def _heeds(process: int) -> bool:
    """Whether the process catches SIGTERM by now."""
    caught = next(
        line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("SigCgt:")
    )
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_stop_that_another_start_followed_is_forgotten(tmp_path: Path) -> None:
    code, said = Agent(tmp_path, "is stopped to begin anew", *ELASTIC).end()
    assert code == 0, said


@pytest.mark.parametrize(("what", "code"), [("is killed", 137), ("fails", 3)])
def test_a_failure_is_told_by_its_own_exit_code(what: str, code: int, tmp_path: Path) -> None:
    ended, said = Agent(tmp_path, what).end()
    assert ended == code and "Traceback" not in said, said
    assert f"exited with {code}, the first process on this host that failed" in said


def test_a_run_that_is_finished_ends_with_nothing_to_say(tmp_path: Path) -> None:
    assert Agent(tmp_path, "finishes", processes=1).end() == (0, "")


def test_who_has_finished_and_is_asked_while_others_have_not_waits_for_them(tmp_path: Path) -> None:
    """Its agent waits for the other's, and has no process to ask."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    agents = []
    for rank, what in enumerate(("finishes", "heeds")):
        folder = tmp_path / what
        folder.mkdir()
        agents.append(Agent(folder, what, "--node-rank", str(rank), nodes=2, processes=1, port=port))
    agents[1].until_ready(1)
    time.sleep(2.0)  # the first agent's process has left
    agents[0].process.send_signal(signal.SIGTERM)
    time.sleep(6.5)
    assert agents[0].process.poll() is None, agents[0].said()
    agents[1].process.send_signal(signal.SIGTERM)
    assert [each.end()[0] for each in agents] == [0, 75]


def test_processes_that_hang_are_killed_when_their_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    agent = Agent(tmp_path, "hangs")
    agent.until_ready()
    agent.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert agent.end()[0] == 137
    assert 2 < time.monotonic() - began < 10
