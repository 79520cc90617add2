"""Worker processes: what they inherit, and that they end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from terakoya import process_pool
from terakoya.errors import UserError
from terakoya.process_pool import available_cores, cpu_quota, in_order, warm_up, workers

_mark = ""


def _start(mark: str) -> None:
    global _mark
    _mark = mark


def _seen(name: str) -> tuple[str, str | None, int]:
    return _mark, os.environ.get(name), os.getpid()


def _die() -> None:
    os._exit(9)


def test_workers_start_with_their_arguments_and_the_current_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up()  # from here on the server's environment is old
    for value in ("one", "two", None):
        monkeypatch.setenv("TERAKOYA_TEST", value) if value else monkeypatch.delenv("TERAKOYA_TEST")
        with workers(2, _start, ["given"], task="test") as submit:
            found = [submit(_seen, "TERAKOYA_TEST").result() for _ in range(4)]
        assert {each[:2] for each in found} == {("given", value)}
        assert os.getpid() not in {each[2] for each in found}


def test_a_worker_that_dies_is_explained() -> None:
    with (
        pytest.raises(UserError, match=r"counting: a worker process died.*fewer than --processes 2\. Nothing is lost"),
        workers(2, _start, ["given"], task="counting", remedy="Nothing is lost") as submit,
    ):
        submit(_die).result()


IMPORTING = """
from terakoya.process_pool import workers
from slow import nothing

if __name__ == "__main__":
    try:
        with workers(1, nothing, [], task="test") as submit:
            print("up", flush=True)
            submit(print, "a worker that starts after its parent has ended").result()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


SLOW = """
import sys, time

def nothing() -> None: ...

if sys.argv[0] == "-c":  # the server
    time.sleep(5)
"""


def test_an_interrupt_while_the_server_imports_is_for_its_parent_alone(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "main.py").write_text(IMPORTING)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        time.sleep(1)
        os.killpg(parent.pid, signal.SIGINT)
        out, err = parent.communicate(timeout=20)
        assert (parent.returncode, out, err) == (0, "interrupted\n", "")  # of the server's and the worker's end, too


def _greeter(greeting: str) -> Callable[[str, float], str]:
    def greet(name: str, seconds: float) -> str:
        time.sleep(seconds)
        return f"{greeting} {name}"

    return greet


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_calls_of_which_few_are_taken_ahead(processes: int) -> None:
    taken = []

    def calls() -> Iterator[tuple[int, tuple[str, float]]]:
        for number in range(12):
            taken.append(number)
            yield number, (chr(ord("a") + number), 0.2 if number == 0 else 0.0)  # the first is ready last

    found = []
    for key, text in in_order(calls(), processes, _greeter, ["good day"], task="test"):
        found.append((key, text))
        assert len(taken) <= len(found) + 2 * processes
    assert found == [(number, f"good day {chr(ord('a') + number)}") for number in range(12)]


SLEEPERS = """
import sys, time
from terakoya.process_pool import workers

def nothing() -> None: ...

def sleep(seconds: float) -> None:
    time.sleep(seconds)

if __name__ == "__main__":
    with workers(2, nothing, [], task="test") as submit:
        waiting = [submit(sleep, 0.0).result() for _ in range(4)] + [submit(sleep, 60.0) for _ in range(2)]
        print("up", flush=True)
        if sys.argv[1] == "fail":
            raise SystemExit(3)
        time.sleep(60)
"""


@pytest.mark.parametrize("end", ["kill", "fail"])
def test_workers_end_with_their_parent(tmp_path: Path, end: str) -> None:
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    with subprocess.Popen([sys.executable, str(script), end], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        family = psutil.Process(parent.pid).children(recursive=True)
        if end == "kill":
            parent.kill()
        assert parent.wait(20) == (3 if end == "fail" else -9)
    assert end == "fail" or len(family) >= 2
    until = time.monotonic() + 10
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family):
        assert time.monotonic() < until, f"still there: {family}"
        time.sleep(0.05)


def _exit(code: int) -> None:
    os._exit(code)


def test_a_worker_that_ends_with_an_error_is_not_called_a_lack_of_memory() -> None:
    with (
        pytest.raises(UserError, match="counting: a worker process ended with an error, which is printed above"),
        workers(2, _start, ["given"], task="counting") as submit,
    ):
        submit(_exit, 1).result()


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "400000 100000"}, 1.0),
        ("2:a:/x\n1:cpu,a:/a\n", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3.0),
        ("1:cpu:/of/the/host\n", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)  # fmt: skip
def test_a_containers_limit_of_processors_is_read(
    groups: str, files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(groups)
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(f"{content}\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "own") == cores


def test_pools_and_the_doctor_count_the_cores_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, cores in ((None, 8), (2.5, 2), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(process_pool, "cpu_quota", lambda quota=quota: quota)
        assert available_cores() == cores
