"""Commands on several hosts at once: who is asked to stop when one fails, and which exit code comes out."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from terakoya.training.distributed.signals import exit_code
from terakoya_plugins.launchers.hosts.run_on_hosts import Remote, run_together


def remotes(folder: Path, **commands: str) -> list[Remote]:
    """Commands by host; each is asked to stop by a file of its name."""
    return [Remote(host, command, f"touch {folder / host}") for host, command in commands.items()]


def until_asked(host: str, code: int) -> str:
    """Waits to be asked, in the folder where it starts, and ends with `code`."""
    return f"until [ -e {host} ]; do sleep 0.02; done; exit {code}"


def test_what_they_say_stands_behind_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_together(remotes(tmp_path, a01="echo one; echo two >&2", a02="echo three")) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[a01] one", "[a01] two", "[a02] three"]


def test_others_are_asked_to_stop_some_time_after_one_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    assert run_together(remotes(tmp_path, a01=until_asked("a01", 75), a02="exit 3"), grace_seconds=0.5) == 3
    assert time.monotonic() - started >= 0.5
    assert (tmp_path / "a01").exists() and not (tmp_path / "a02").exists()


def test_others_go_on_where_they_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        ended = run_together(remotes(tmp_path, a01="sleep 0.5", a02="exit 3"), others_go_on=True, grace_seconds=0.1)
    assert ended == 0
    assert not (tmp_path / "a01").exists()
    assert "a02 has ended with 3; the others go on" in caplog.text
    assert run_together(remotes(tmp_path, a01="exit 4", a02="sleep 0.2"), others_go_on=True) == 4


def test_a_host_that_has_saved_is_not_told_of_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        assert run_together(remotes(tmp_path, a01="sleep 0.5; exit 75", a02="exit 75"), others_go_on=True) == 75
    assert caplog.text == ""


def test_ctrl_c_asks_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    both = remotes(tmp_path, a01=until_asked("a01", 75), a02=until_asked("a02", 75))
    assert run_together(both, others_go_on=True) == 75


def test_a_run_that_was_asked_to_stop_is_not_started_again() -> None:
    for restarts, code in ((None, 75), ("0", 75), ("3", 0)):
        environment = {} if restarts is None else {"TORCHELASTIC_MAX_RESTARTS": restarts}
        assert exit_code(stopped=True, environment=environment) == code
        assert exit_code(stopped=False, environment=environment) == 0
