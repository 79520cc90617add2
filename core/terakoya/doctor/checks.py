"""What a machine offers to training, judged: GPUs, memory, disk, ports, build locks, threads.

Each check takes what it looks at as arguments and returns findings; `doctor` runs them all.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GB = 1e9
OLD_LOCK_SECONDS = 3600.0


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; `remedy` says what to do, empty where there is nothing."""

    check: str
    status: Literal["ok", "warning", "error"]
    message: str
    remedy: str = ""


def nvidia_smi() -> list[str] | None:
    """Of each GPU "name, driver version, total MiB, free MiB" as the driver sees it; None without a working driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def gpus(*, built_for: str | None, available: bool, driver: Sequence[str] | None) -> list[Finding]:
    """Whether torch, `built_for` a CUDA version or None, uses the GPUs that `driver` (see `nvidia_smi`) names."""
    if driver and built_for is None:
        return [
            Finding(
                "GPU",
                "error",
                f"there are {len(driver)} GPUs, but this torch is a build without CUDA and will not use them",
                "install a CUDA build of torch: https://pytorch.org/get-started/locally",
            )
        ]
    if driver and not available:
        return [
            Finding(
                "GPU",
                "error",
                f"torch for CUDA {built_for} cannot use the GPUs of this driver: {driver[0]}",
                "update the driver, or install a torch for an older CUDA; look at CUDA_VISIBLE_DEVICES too",
            )
        ]
    if not driver:
        if built_for is not None and not available:
            return [
                Finding(
                    "GPU",
                    "warning",
                    f"torch is built for CUDA {built_for}, but there is no working driver; training runs on the CPU",
                    "on a machine with a GPU: install the NVIDIA driver, in a container add --gpus all",
                )
            ]
        if not available:
            return [Finding("GPU", "ok", "none; training runs on the CPU")]
        return [Finding("GPU", "ok", f"torch for CUDA {built_for}; nvidia-smi is not here to tell more")]
    findings = []
    for index, line in enumerate(driver):
        name, version, total, free = (part.strip() for part in line.split(","))
        text = f"{index}: {name}, driver {version}, CUDA {built_for}, {int(free):,} of {int(total):,} MiB free"
        if int(free) < 0.8 * int(total):
            remedy = (
                "CUDA out of memory: end the processes that `nvidia-smi` lists, or lower micro_batch_size "
                "(the training stays the same), or raise parallel.zero_stage"
            )
            findings.append(Finding("GPU", "warning", text, remedy))
        else:
            findings.append(Finding("GPU", "ok", text))
    return findings


def compiler(*, built_for: str | None, deepspeed: bool) -> list[Finding]:
    """Whether the CUDA compiler that DeepSpeed builds its kernels with is torch's version."""
    if built_for is None or not deepspeed:
        return []
    program = shutil.which("nvcc") or str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [
            Finding(
                "CUDA compiler",
                "warning",
                "nvcc is not found; DeepSpeed cannot build kernels",
                f"needed for DeepSpeed only: install the CUDA {built_for} toolkit and set CUDA_HOME",
            )
        ]
    found = re.search(r"release (\d+)\.(\d+)", answer)
    version = f"{found[1]}.{found[2]}" if found else "unknown"
    if version.partition(".")[0] != built_for.partition(".")[0]:
        return [
            Finding(
                "CUDA compiler",
                "error",
                f"nvcc is {version}, torch is built for CUDA {built_for}; DeepSpeed's kernels will not build",
                f"install the CUDA {built_for} toolkit and set CUDA_HOME to it",
            )
        ]
    return [Finding("CUDA compiler", "ok", f"nvcc {version}")]


def memory(*, available: int, total: int, cgroup: Path = Path("/sys/fs/cgroup")) -> list[Finding]:
    """Free memory in bytes, the container's bound, and whether anything was killed for memory."""
    remedy = "a process killed with signal 9 ran out of memory: fewer processes, or a smaller micro_batch_size"
    findings = []
    bound = _number(cgroup / "memory.max")
    if bound is not None and bound < total:
        used = _number(cgroup / "memory.current") or 0
        total, available = bound, min(available, bound - used)
    status: Literal["ok", "warning"] = "warning" if available < 2 * GB else "ok"
    text = f"{available / GB:.1f} of {total / GB:.1f} GB available"
    findings.append(Finding("memory", status, text, remedy if status == "warning" else ""))
    killed = re.search(r"^oom_kill (\d+)", _text(cgroup / "memory.events"), re.M)
    if killed and int(killed[1]):
        text = f"{killed[1]} processes of this container were killed for memory since it started"
        findings.append(Finding("memory", "warning", text, remedy))
    return findings


def shared_memory(folder: Path = Path("/dev/shm")) -> list[Finding]:
    """The size of the memory that processes share: NCCL and gloo move gradients through it."""
    if not folder.is_dir():
        return [Finding("shared memory", "warning", f"{folder} does not exist", "needed for more than one process")]
    size = shutil.disk_usage(folder).total
    if size < GB:
        return [
            Finding(
                "shared memory",
                "warning",
                f"{folder} holds {size / 1e6:.0f} MB; several processes may die with a bus error",
                "in a container: docker run --shm-size=8g (or --ipc=host)",
            )
        ]
    return [Finding("shared memory", "ok", f"{folder} holds {size / GB:.1f} GB")]


def disk(folder: Path) -> list[Finding]:
    """Free disk where the command is run. A BERT-base checkpoint takes 1.8 GB."""
    free = shutil.disk_usage(folder).free
    remedy = "free some, or put stores and runs elsewhere; `checkpoint.keep` bounds what a run keeps"
    text = f"{free / GB:.1f} GB free at {folder}"
    if free < GB:
        return [Finding("disk", "error", text, remedy)]
    return [Finding("disk", "warning", text, remedy) if free < 20 * GB else Finding("disk", "ok", text)]


def port(number: int = 29500) -> list[Finding]:
    """Whether the port where processes meet is free on this machine."""
    with socket.socket() as candidate:
        try:
            candidate.bind(("127.0.0.1", number))
        except OSError:
            return [
                Finding(
                    "port",
                    "warning",
                    f"{number}, where torchrun's processes meet, is taken",
                    "torchrun --master-port 0 takes a free one; or end the run that still holds it",
                )
            ]
    return [Finding("port", "ok", f"{number} is free")]


def network(environment: Mapping[str, str], interfaces: Sequence[str]) -> list[Finding]:
    """Whether the network cards that NCCL and gloo are told to use exist."""
    findings = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for name in environment.get(variable, "").split(","):
            if name and name[0] not in "^=" and not any(each.startswith(name) for each in interfaces):
                known = ", ".join(sorted(interfaces))
                text = f"{variable}={name}: there is no such network card"
                findings.append(Finding("network", "error", text, f"set it to one of {known}, or unset it"))
    return findings


def build_locks(folder: Path, *, processes: Path = Path("/proc")) -> list[Finding]:
    """Locks of unfinished kernel builds below `folder`: a build waits for one forever, even if its owner is dead."""
    findings = []
    for lock in sorted(folder.rglob("lock")) if folder.is_dir() else ():
        age = time.time() - lock.stat().st_mtime
        holders = _holders(lock, processes)
        text = f"{lock}, {age / 60:.0f} minutes old"
        remove = f"rm {lock}"
        if not holders:
            remedy = f"a start that hangs at a kernel build waits for it; no process here holds it: {remove}"
            findings.append(Finding("build locks", "error", f"{text}, held by nobody on this machine", remedy))
        elif age > OLD_LOCK_SECONDS:
            remedy = f"if process {holders[0]} is stuck, end it, then: {remove}"
            findings.append(Finding("build locks", "warning", f"{text}, held by process {holders[0]}", remedy))
        else:
            findings.append(Finding("build locks", "ok", f"{text}: process {holders[0]} is building"))
    return findings or [Finding("build locks", "ok", "no kernel build is waiting")]


def _holders(file: Path, processes: Path) -> list[int]:
    """The ids of the processes that have `file` open, as far as this user may look."""
    found = []
    for folder in processes.glob("[0-9]*"):
        try:
            if any(link.readlink() == file for link in (folder / "fd").iterdir()):
                found.append(int(folder.name))
        except OSError:  # the process ended, or belongs to somebody else
            continue
    return found


def threads(environment: Mapping[str, str], *, cores: int, cgroup: Path = Path("/sys/fs/cgroup")) -> list[Finding]:
    """Whether the processes of a node ask for more threads than it has cores."""
    quota = re.match(r"(\d+) (\d+)", _text(cgroup / "cpu.max"))
    if quota:
        cores = min(cores, max(1, int(quota[1]) // int(quota[2])))
    asked = environment.get("OMP_NUM_THREADS", "")
    processes = environment.get("LOCAL_WORLD_SIZE", "1")
    if asked and not asked.isdigit():
        return [Finding("threads", "error", f"OMP_NUM_THREADS={asked} is no number", "set it to a number, or unset it")]
    wanted = int(asked or cores) * (int(processes) if processes.isdigit() else 1)
    text = f"{cores} cores, OMP_NUM_THREADS {asked or 'not set'}"
    if wanted > cores:
        remedy = "threads that wait for each other train slower: OMP_NUM_THREADS = cores / processes of the node"
        return [Finding("threads", "warning", f"{text}: {wanted} threads on {cores} cores", remedy)]
    return [Finding("threads", "ok", text)]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None
