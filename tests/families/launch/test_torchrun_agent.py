"""The torchrun agent: stop requests and exit codes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import toy
from selection import at_night

PROCESS = """\
import os, signal, sys, time
from pathlib import Path
from terakoya.distributed import signals

def ready():
    print("ready", flush=True)

match sys.argv[1]:
    case "saves":
        with signals.StopRequest() as stop:
            stop.listen()
            ready()
            while stop.signal is None:
                time.sleep(0.01)
        signals.ignore_stop_signals()
        os.kill(os.getpid(), signal.SIGTERM)  # a second stop request
        sys.exit(signals.exit_code(stopped=True))
    case "hangs":
        with signals.StopRequest() as stop:
            stop.listen()
            ready()
            time.sleep(300)
    case "finishes":
        Path(os.environ[signals.EXIT_CODE_FILE_VARIABLE]).parent.rmdir()  # as a cleanup of old folders does
        signals.ignore_stop_signals()
        Path(__file__).with_name("finished").touch()
        sys.exit(signals.exit_code(stopped=False))
    case "dies":
        ready()
        time.sleep(60)
    case "is killed":
        ready()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    case "fails beside one that is stopped":
        ready()
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(2.5)
        sys.exit(76)
    case "stops to restart":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1 + signals.exit_code(stopped=True))
        with signals.StopRequest() as stop:
            stop.listen()
    case "makes a mistake":
        ready()
        sys.exit(2)
    case "loses the other":
        ready()
        sys.exit(76)
    case "fails":
        sys.exit(3)
"""
AGENT = """
import os, sys
from pathlib import Path
from terakoya_launch import torchrun_agent

for name in ("FAILED_SECONDS", "GRACE_SECONDS"):
    setattr(torchrun_agent, name, float(os.environ.get(name, getattr(torchrun_agent, name))))

class Forwarder(torchrun_agent.SignalForwarder):
    def start(self):
        super().start()
        Path(sys.argv[1]).touch()

torchrun_agent.SignalForwarder = Forwarder
sys.exit(torchrun_agent.run(sys.argv[2:]))
"""
pytestmark = pytest.mark.usefixtures("forks")
ELASTIC = ("--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=600")


class Agent:
    """A torchrun agent over two processes that run the case `what`."""

    def __init__(
        self,
        folder: Path,
        what: str,
        *more: str,
        nodes: int = 1,
        processes: int = 2,
        port: str | None = None,
        stdout: int | None = None,
    ) -> None:
        port = port or str(toy.free_port())
        file = folder / "process.py"
        file.write_text(PROCESS)
        self.printed = folder / "printed"
        self._listening = folder / "listening"
        elastic = "--rdzv-backend" in more
        address = ("--rdzv-endpoint", f"127.0.0.1:{port}") if elastic else ("--master-port", port)
        arguments = ("--nnodes", str(nodes), "--nproc-per-node", str(processes), *more, *address, str(file), what)
        with self.printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-c", AGENT, str(self._listening), *arguments],
                stdout=stdout or printed,
                stderr=printed,
            )

    def until_ready(self, times: int = 2) -> None:
        """Waits until `times` processes have printed "ready"."""
        self.until(lambda: self.output().count("ready") >= times)

    def until_listening(self) -> None:
        """Waits until the agent handles signals."""
        self.until(self._listening.exists)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def output(self) -> str:
        return self.printed.read_text()

    def end(self) -> tuple[int, str]:
        """Waits for the end; returns the exit code and the output."""
        try:
            return self.process.wait(timeout=90), self.output()
        finally:
            self.process.kill()


@pytest.mark.parametrize(
    ("number", "more"),
    at_night(
        itertools.product([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], [(), ELASTIC]),
        always=[(signal.SIGTERM, ELASTIC)],
    ),
)
def test_after_a_stop_request_the_processes_save_and_the_agent_exits_with_75(
    number: signal.Signals, more: tuple[str, ...], tmp_path: Path
) -> None:
    agent = Agent(tmp_path, "saves", *more)
    agent.until_ready()
    agent.process.send_signal(number)
    code, output = agent.end()
    assert code == 75 and "Traceback" not in output and "exitcode" not in output, output


def test_processes_restarted_after_a_stop_request_receive_it_too(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "dies", *ELASTIC)
    agent.until_ready()
    agent.process.send_signal(signal.SIGTERM)
    code, output = agent.end()
    assert code == 143 and "exited with 143, the first process on this host that failed" in output, output


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_waits_for_other_hosts_exits_at_once(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRACE_SECONDS", "75")  # so that "at once" differs from it on a busy machine, too
    agent = Agent(tmp_path, "saves", *(("--node-rank", "1") if rank else ELASTIC), nodes=2)
    agent.until_listening()
    time.sleep(2.0)  # until it waits
    agent.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert agent.end()[0] == 143
    assert time.monotonic() - began < 30


@pytest.mark.nightly
def test_a_stop_before_a_restart_is_forgotten(tmp_path: Path) -> None:
    code, output = Agent(tmp_path, "stops to restart", *ELASTIC).end()
    assert code == 0, output


@pytest.mark.parametrize(("what", "code"), at_night([("is killed", 137), ("fails", 3)], always=[("is killed", 137)]))
def test_a_failure_keeps_its_exit_code(what: str, code: int, tmp_path: Path) -> None:
    ended, output = Agent(tmp_path, what).end()
    assert ended == code and "Traceback" not in output, output
    assert f"exited with {code}, the first process on this host that failed" in output


def test_processes_that_failed_on_what_a_user_has_to_mend_do_not_start_again(tmp_path: Path) -> None:
    code, output = Agent(tmp_path, "makes a mistake", *ELASTIC, processes=1).end()
    assert code == 2 and output.count("ready") == 1, output


@pytest.mark.nightly
def test_one_host_that_has_failed_on_what_a_user_has_to_mend_ends_the_others(tmp_path: Path) -> None:
    """The first agent is the rendezvous of both, and would start its process again with that of the second."""
    port = str(toy.free_port())
    agents = []
    for rank, what in enumerate(("loses the other", "makes a mistake")):
        (tmp_path / what).mkdir()
        conf = ("--rdzv-conf", f"join_timeout=600,is_host={1 - rank}", "--rdzv-id", "run")
        agents.append(Agent(tmp_path / what, what, *ELASTIC[:4], *conf, nodes=2, processes=1, port=port))
    (first, said), (second, _) = (agent.end() for agent in agents)
    assert (first, second) == (76, 2), said
    assert said.count("ready") == 1 and "Traceback" not in said, said


def test_a_finished_run_prints_nothing(tmp_path: Path) -> None:
    assert Agent(tmp_path, "finishes", processes=1).end() == (0, "")


@pytest.mark.nightly
def test_an_agent_whose_processes_have_finished_waits_for_the_other_agent_after_a_stop_request(tmp_path: Path) -> None:
    """The agent has no process left to which it could forward the request."""
    port = str(toy.free_port())
    agents = []
    for rank, what in enumerate(("finishes", "saves")):
        folder = tmp_path / what
        folder.mkdir()
        agents.append(Agent(folder, what, "--node-rank", str(rank), nodes=2, processes=1, port=port))
    agents[1].until_ready(1)
    agents[0].until((tmp_path / "finishes/finished").exists)
    time.sleep(2.0)  # until the agent has seen that its process has exited
    agents[0].process.send_signal(signal.SIGTERM)
    time.sleep(3.0)
    assert agents[0].process.poll() is None, agents[0].output()
    agents[1].process.send_signal(signal.SIGTERM)
    assert [agent.end()[0] for agent in agents] == [0, 75]


@pytest.mark.nightly
def test_processes_that_hang_are_killed_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    agent = Agent(tmp_path, "hangs")
    agent.until_ready()
    agent.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert agent.end()[0] == 137
    assert 2 < time.monotonic() - began < 60


@pytest.mark.nightly
def test_processes_save_when_the_connection_that_started_the_agent_is_gone(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    agent = Agent(tmp_path, "saves", processes=1, stdout=writes)
    os.close(writes)
    with os.fdopen(reads) as output:
        assert output.readline() == "ready\n"
    assert agent.end()[0] == 75


@pytest.mark.nightly
def test_a_process_that_is_stopped_is_killed_after_another_has_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILED_SECONDS", "1")
    code, output = Agent(tmp_path, "fails beside one that is stopped").end()
    assert code == 76 and "forcefully exiting" not in output, output
