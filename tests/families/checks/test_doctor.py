"""Each check of the doctor reports a problem on one line and says what to do."""

from __future__ import annotations

import errno
import json
import os
import pwd
import socket
import sys
import time
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from command_line import exit_code

from terakoya_checks import diagnose
from terakoya_checks import machine as checks
from terakoya_checks.machine import Finding

Usage = namedtuple("Usage", "total used free")


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_an_old_gpu_driver_a_cpu_build_and_a_missing_driver_are_distinguished() -> None:
    card = ["NVIDIA H100 80GB HBM3, 550.54.15, 81559, 81000"]
    cpu_build = only(checks.check_gpus(built_for=None, available=False, driver=card))
    assert cpu_build.status == "error" and "without CUDA" in cpu_build.message and "install" in cpu_build.remedy
    old = only(checks.check_gpus(built_for="13.0", available=False, driver=card))
    assert old.status == "error" and "CUDA 13.0" in old.message and "550.54.15" in old.message
    none = only(checks.check_gpus(built_for="12.6", available=False, driver=None))
    assert none.status == "warning" and "no working driver" in none.message
    assert only(checks.check_gpus(built_for=None, available=False, driver=None)).status == "ok"
    good = only(checks.check_gpus(built_for="12.6", available=True, driver=card))
    assert good.status == "ok" and "81,000 of 81,559 MiB free" in good.message


def test_a_gpu_that_shares_its_memory_has_no_numbers() -> None:
    shared = ["NVIDIA GB10, 580.95.05, [N/A], [N/A]"]
    found = only(checks.check_gpus(built_for="13.0", available=True, driver=shared))
    assert found.status == "ok" and "0: NVIDIA GB10" in found.message and "memory is not known" in found.message


def test_the_remedy_of_a_full_gpu_names_cuda_out_of_memory() -> None:
    full = checks.check_gpus(built_for="12.6", available=True, driver=["A, 1, 100, 99", "B, 1, 100, 10"])[1]
    assert full.status == "warning" and full.message.startswith("1: B")
    assert "CUDA out of memory" in full.remedy and "micro_batch_size" in full.remedy


def test_a_stale_build_lock_is_an_error_with_the_command_that_removes_it(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cu126" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 7200, time.time() - 7200))
    stale = only(checks.check_build_locks(tmp_path))
    assert stale.status == "error" and "120 minutes old" in stale.message and f"rm {lock}" in stale.remedy


@pytest.mark.skipif(sys.platform != "linux", reason="the processes that hold a file are read from /proc")
def test_a_lock_that_a_process_holds_is_reported_only_if_it_is_old(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w"):
        held = only(checks.check_build_locks(tmp_path))
        assert held.status == "ok" and f"process {os.getpid()}" in held.message
        os.utime(lock, (0, 0))
        old = only(checks.check_build_locks(tmp_path))
        assert old.status == "warning" and f"process {os.getpid()}" in old.remedy
    assert only(checks.check_build_locks(tmp_path)).status == "error"


def test_no_lock_is_ok(tmp_path: Path) -> None:
    assert only(checks.check_build_locks(tmp_path / "nowhere")).status == "ok"


def test_a_folder_of_builds_of_another_user_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "is_dir", refuse)
    foreign = only(checks.check_build_locks(tmp_path))
    assert foreign.status == "warning" and f"{tmp_path} " in foreign.message
    assert "TORCH_EXTENSIONS_DIR" in foreign.remedy


def test_memory_uses_the_containers_limit_and_reports_killed_processes(tmp_path: Path) -> None:
    plenty = only(checks.check_memory(available=30 * 10**9, total=32 * 10**9, cgroup=tmp_path))
    assert plenty == Finding("memory", "ok", "30.0 of 32.0 GB available")
    (tmp_path / "memory.max").write_text("4000000000\n")
    (tmp_path / "memory.current").write_text("3000000000\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\noom 1\noom_kill 3\n")
    low, killed = checks.check_memory(available=30 * 10**9, total=32 * 10**9, cgroup=tmp_path)
    assert low.status == "warning" and low.message == "1.0 of 4.0 GB available"
    assert killed.message.startswith("3 processes of this container were killed for memory")
    assert "signal 9" in killed.remedy and "micro_batch_size" in killed.remedy


def test_small_shared_memory_and_a_full_disk_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: Usage(64_000_000, 0, 5 * 10**8))
    shared = only(checks.check_shared_memory(tmp_path))
    assert shared.status == "warning" and "64 MB" in shared.message and "--shm-size" in shared.remedy
    full = only(checks.check_disk(tmp_path))
    assert full.status == "error" and "0.5 GB free" in full.message and full.remedy


def test_a_port_in_use_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        finding = only(checks.check_port(number))
    assert finding.status == "warning" and str(number) in finding.message and "--master-port" in finding.remedy
    assert only(checks.check_port(number)).status == "ok"


def test_a_network_interface_that_does_not_exist_is_reported() -> None:
    error = only(checks.check_network({"NCCL_SOCKET_IFNAME": "hoge"}, ["lo", "eth0"]))
    assert error.status == "error" and "hoge" in error.message and "eth0, lo" in error.remedy
    assert checks.check_network({"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "^docker"}, ["eth0"]) == []


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, "ok"),
        ({"OMP_NUM_THREADS": "4"}, "ok"),
        ({"OMP_NUM_THREADS": "9"}, "warning"),
        ({"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "4"}, "warning"),
        ({"LOCAL_WORLD_SIZE": "2"}, "warning"),
        ({"OMP_NUM_THREADS": "many"}, "error"),
    ],
)
def test_more_threads_than_cores_are_reported(environment: dict[str, str], status: str) -> None:
    assert only(checks.check_threads(environment, cores=8)).status == status


def test_versions_out_of_range_and_missing_packages_are_reported_with_the_command() -> None:
    versions = {"torch": "2.10.0", "numpy": "2.1.0", "deepspeed": "0.17.0"}

    def installed(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    requirements = ["torch<2.14,>=2.11", "numpy>=2.0", "typer>=0.15", "deepspeed>=0.18; extra == 'deepspeed'"]
    requirements += ["ninja>=1.11; extra == 'deepspeed'", "pytest>=8; extra == 'dev'"]
    summary, *findings = diagnose.check_versions(requirements=requirements, python=">=3.99", installed=installed)
    assert "numpy 2.1.0" in summary.message and "torch" not in summary.message
    reported = [(finding.status, finding.message.split(" (")[0]) for finding in findings]
    running = ".".join(map(str, sys.version_info[:3]))
    assert reported == [
        ("error", f"Python {running}: expected >=3.99"),
        ("error", "torch 2.10.0: expected <2.14,>=2.11"),
        ("error", "typer is not installed: expected >=0.15"),
        ("warning", "deepspeed 0.17.0: expected >=0.18"),
        ("ok", 'ninja is not installed; only "parallel": {"engine": "deepspeed"} needs it'),
    ]
    assert findings[1].remedy == 'pip install "torch<2.14,>=2.11"'


def test_this_installation_fits_its_own_metadata() -> None:
    summary, *others = diagnose.check_versions()
    assert all(name in summary.message for name in ("Python 3", "torch 2", "transformers 5", "tensorboard"))
    assert [finding for finding in others if finding.status == "error"] == []


def test_a_terminal_that_is_not_utf8_is_an_error() -> None:
    assert only(diagnose.check_text_encoding("utf-8", "UTF-8")).status == "ok"
    assert only(diagnose.check_text_encoding("utf-8", None)).status == "ok"
    error = only(diagnose.check_text_encoding("utf-8", "ANSI_X3.4-1968"))
    assert error.status == "error" and "the terminal" in error.message and "C.UTF-8" in error.remedy


def test_a_dictionary_that_is_not_downloaded_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unidic").mkdir()
    (tmp_path / "unidic" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    present, warning = diagnose.check_dictionaries(["ipadic", "unidic"])
    assert present.message == "ipadic"
    assert warning.status == "warning" and warning.remedy == "python -m unidic download"
    missing = diagnose.check_dictionaries(["no_such_dictionary"])[1]
    assert missing.status == "error" and missing.remedy == "pip install no-such-dictionary"


def test_a_missing_c_compiler_is_a_warning() -> None:
    assert only(diagnose.check_c_compiler(True)).status == "ok"
    missing = only(diagnose.check_c_compiler(False))
    assert missing.status == "warning" and "CC" in missing.remedy


def test_the_library_of_bpe_is_named() -> None:
    assert "is read by it" in only(diagnose.check_fastokens(True)).message
    missing = only(diagnose.check_fastokens(False))
    assert missing.status == "ok" and missing.remedy == 'pip install "terakoya[fastokens]"'


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("error", 2)])
def test_the_command_exits_with_2_if_there_is_an_error(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = Finding("disk", status, "full [really]", "free some")  # type: ignore[arg-type]
    monkeypatch.setattr(diagnose, "diagnose", lambda folder: [finding])
    for arguments in (["doctor"], ["doctor", "--json"]):
        assert exit_code(*arguments) == code
    lines, _, as_json = capsys.readouterr().out.partition("[\n")
    assert lines.split() == [status, "disk", "full", "[really]", "free", "some"]
    assert json.loads("[" + as_json) == [
        {"check": "disk", "status": status, "message": "full [really]", "remedy": "free some"}
    ]


def test_all_checks_run_on_this_machine(tmp_path: Path) -> None:
    names = [finding.check for finding in diagnose.diagnose(tmp_path)]
    for check in ("versions", "GPU", "build locks", "memory", "shared memory", "disk", "threads", "port"):
        assert check in names
    assert {"text", "dictionaries", "plugins"} <= set(names)


def test_a_check_that_cannot_be_made_is_a_finding_and_the_others_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without /proc, whose user has no home folder."""

    def no_proc() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/meminfo")

    def nobody(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.setattr(psutil, "virtual_memory", no_proc)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME")
    found = diagnose.diagnose(tmp_path)
    memory = only([finding for finding in found if finding.check == "memory"])
    assert (memory.status, memory.message) == ("error", "/proc/meminfo: No such file or directory")
    assert "mount -t proc" in memory.remedy
    assert {"build locks", "disk", "text", "plugins"} <= {finding.check for finding in found}
