"""Commands on several hosts: which hosts get a stop request when one fails, and the exit code."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from terakoya.distributed.signals import exit_code
from terakoya_launch.launchers.hosts import run_on_hosts as run_on_hosts_module
from terakoya_launch.launchers.hosts.run_on_hosts import RemoteCommand, run_on_hosts


def remotes(folder: Path, **commands: str) -> list[RemoteCommand]:
    """Commands by host; the stop request is a file with the host's name."""
    return [RemoteCommand(host, command, f"touch {folder / host}") for host, command in commands.items()]


def until_stop_request(host: str, code: int) -> str:
    """Waits for a stop request in the working folder and exits with `code`."""
    return f"until [ -e {host} ]; do sleep 0.02; done; exit {code}"


def send_once_handled(number: signal.Signals) -> None:
    """Sends this process the signal `number` as soon as somebody has replaced its handler."""
    before = signal.getsignal(number)

    def send() -> None:
        while signal.getsignal(number) is before:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def test_lines_are_printed_after_the_hosts_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_on_hosts(remotes(tmp_path, a01="echo one; echo two >&2", a02="echo three")) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[a01] one", "[a01] two", "[a02] three"]


def test_others_get_a_stop_request_some_time_after_one_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    assert run_on_hosts(remotes(tmp_path, a01=until_stop_request("a01", 75), a02="exit 3"), grace_seconds=0.5) == 3
    assert time.monotonic() - started >= 0.5
    assert (tmp_path / "a01").exists() and not (tmp_path / "a02").exists()


def test_others_continue_if_they_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        ended = run_on_hosts(
            remotes(tmp_path, a01="sleep 1", a02="exit 3"), continue_after_failure=True, grace_seconds=0.1
        )
    assert ended == 0
    assert not (tmp_path / "a01").exists()
    assert "a02 ended with exit code 3; the others continue" in caplog.text
    assert run_on_hosts(remotes(tmp_path, a01="exit 4", a02="sleep 0.2"), continue_after_failure=True) == 4
    assert run_on_hosts(remotes(tmp_path, a01="exit 76", a02="exit 2"), continue_after_failure=True) == 2


def test_the_first_host_may_be_lost_where_they_meet_elsewhere(tmp_path: Path) -> None:
    def code(*codes: int) -> int:
        remotes = [
            RemoteCommand(f"a0{number}", f"sleep 0.{number}; exit {each}", "true") for number, each in enumerate(codes)
        ]
        return run_on_hosts(remotes, continue_after_failure=True, first_is_needed=False)

    assert code(137, 0) == 0 and code(137, 75) == 75 and code(137, 2) == 2 and code(0, 137) == 0


def test_a_host_that_has_saved_is_not_reported_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        assert (
            run_on_hosts(remotes(tmp_path, a01="sleep 0.5; exit 75", a02="exit 75"), continue_after_failure=True) == 75
        )
    assert caplog.text == ""


def test_ctrl_c_sends_a_stop_request_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    send_once_handled(signal.SIGINT)
    both = remotes(tmp_path, a01=until_stop_request("a01", 75), a02=until_stop_request("a02", 75))
    assert run_on_hosts(both, continue_after_failure=True) == 75


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_sends_a_stop_request_to_all(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    send_once_handled(number)
    assert run_on_hosts(remotes(tmp_path, a01=until_stop_request("a01", 75))) == 75


def test_a_host_that_lost_another_is_not_the_cause_and_others_are_stopped_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_on_hosts_module, "LOST_GRACE_SECONDS", 0.1)
    began = time.monotonic()
    assert run_on_hosts(remotes(tmp_path, a01="exit 76", a02=until_stop_request("a02", 137))) == 137
    assert run_on_hosts(remotes(tmp_path, a01="exit 76", a02="exit 76")) == 76
    assert time.monotonic() - began < 20


HOSTS = """
import sys
from terakoya_launch.launchers.hosts import run_on_hosts as run_on_hosts_module
from terakoya_launch.launchers.hosts.run_on_hosts import RemoteCommand, run_on_hosts
run_on_hosts([RemoteCommand("a01", sys.argv[1], "true")])
"""


def test_connections_end_with_the_launcher(tmp_path: Path) -> None:
    """What runs over there finds that nobody reads its output any more."""
    with subprocess.Popen([sys.executable, "-c", HOSTS, f"echo $$ > {tmp_path}/pid; exec sleep 60"]) as launcher:
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        launcher.kill()
    connection = int((tmp_path / "pid").read_text())
    while psutil.pid_exists(connection) and psutil.Process(connection).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_not_restarted_after_a_stop_request() -> None:
    for restarts, code in ((None, 75), ("0", 75), ("3", 0)):
        environment = {} if restarts is None else {"TORCHELASTIC_MAX_RESTARTS": restarts}
        assert exit_code(stopped=True, environment=environment) == code
        assert exit_code(stopped=False, environment=environment) == 0
