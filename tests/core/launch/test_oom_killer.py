"""The message about a process that a signal killed, and whether the kernel was out of memory."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from terakoya.launch import local, oom_killer
from terakoya.launch.oom_killer import CONTAINER, MACHINE, count_oom_kills, explain_exit

NEW_GROUPS = {"proc/self/cgroup": "0::/jobs/one\n", "groups/jobs/one/memory.events": "low 0\noom 3\noom_kill 2\n"}
OLD_GROUPS = {
    "proc/self/cgroup": "3:cpuset:/\n4:hugetlb,memory:/jobs/one\n0::/\n",
    "groups/memory/jobs/one/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}


@pytest.mark.parametrize("groups", [NEW_GROUPS, OLD_GROUPS], ids=["version 2", "version 1"])
def test_kills_are_counted_in_the_container_and_on_the_machine(groups: dict[str, str], tmp_path: Path) -> None:
    for name, text in {**groups, "proc/vmstat": "pgfault 7\noom_kill 5\nnuma_hit 1\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    kills = count_oom_kills(processes=tmp_path / "proc", groups=tmp_path / "groups")
    assert kills == {CONTAINER: 2, MACHINE: 5}
    assert count_oom_kills(processes=tmp_path / "none", groups=tmp_path / "none") == {}


def test_memory_is_blamed_only_if_the_kernel_counted_a_kill() -> None:
    before = {CONTAINER: 0, MACHINE: 4}
    assert explain_exit(0, 0, before, before) is None and explain_exit(0, 75, before, before) is None
    container = explain_exit(1, -9, before, {CONTAINER: 1, MACHINE: 5})
    assert container is not None and container.startswith(
        "process 1 was ended by signal 9 (SIGKILL): this container is out of "
    )
    assert "terakoya estimate" in container
    machine = explain_exit(1, -9, before, {CONTAINER: 0, MACHINE: 5})
    assert machine is not None and "this machine is out of memory" in machine
    other = explain_exit(1, -9, before, before)
    assert other is not None and "not by the kernel" in other and "estimate" not in other
    unknown = explain_exit(1, -9, {}, {})
    assert unknown is not None and "most often the kernel, out of memory" in unknown
    fault = explain_exit(0, -11, before, {CONTAINER: 1, MACHINE: 5})
    assert fault == "process 0 was ended by signal 11 (SIGSEGV)"


def test_run_processes_prints_the_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = tmp_path / "terakoya"  # a stand-in for the program, which kills itself as the kernel would
    program.write_text("#!/bin/bash\nif [ $RANK = 1 ]; then kill -9 $$; fi\nexec sleep 20\n")
    program.chmod(0o755)
    counted = iter([{MACHINE: 4}, {MACHINE: 5}])
    monkeypatch.setattr(oom_killer, "count_oom_kills", lambda: next(counted))
    monkeypatch.setattr(local.sys, "executable", str(program))
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.2)
    started = time.monotonic()
    assert local.run_processes([], 2) == 128 + signal.SIGKILL
    assert time.monotonic() - started < 15.0, "a failure is noticed although the ranks before it still run"
    error = capfd.readouterr().err
    assert "process 1 was ended by signal 9 (SIGKILL): this machine is out of memory" in error
