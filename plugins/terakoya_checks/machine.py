"""Checks whether a machine is ready for training: GPUs, memory, disk, ports, build locks, threads.

Each check receives the facts as arguments and returns findings; `diagnose` runs all checks.
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
from typing import TYPE_CHECKING, Literal

from terakoya.process_pool import lines_of

if TYPE_CHECKING:
    import torch

GB = 1e9
OLD_LOCK_SECONDS = 3600.0


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` says what to do and is empty if there is nothing to do."""

    check: str
    status: Literal["ok", "warning", "error"]
    message: str
    remedy: str = ""


def query_nvidia_smi() -> list[str] | None:
    """Returns "name, driver version, total MiB, free MiB" of each GPU, [N/A] for what is not known; None without a
    working driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in output.stdout.splitlines() if line.strip()]


def check_gpus(*, built_for: str | None, available: bool, driver: Sequence[str] | None) -> list[Finding]:
    """Checks that torch can use the GPUs, and their free memory.

    Args:
        built_for: the CUDA version that torch is built for; None for a build without CUDA.
        available: whether torch can use a GPU.
        driver: the GPUs that the driver lists, as `query_nvidia_smi` returns them.
    """
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
                "update the driver, or install a torch for an older CUDA; also check CUDA_VISIBLE_DEVICES",
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
        return [
            Finding("GPU", "ok", f"torch for CUDA {built_for}; nvidia-smi is not installed, so there are no details")
        ]
    findings = []
    for index, line in enumerate(driver):
        name, version, total, free = (part.strip() for part in line.split(","))
        if not (total.isdigit() and free.isdigit()):  # [N/A] of GPUs that share the processor's memory
            findings.append(
                Finding("GPU", "ok", f"{index}: {name}, driver {version}, CUDA {built_for}; its memory is not known")
            )
            continue
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


def check_compiler(*, built_for: str | None, deepspeed: bool) -> list[Finding]:
    """Checks that the CUDA compiler, which builds DeepSpeed's kernels, has the major version of torch's CUDA."""
    if built_for is None or not deepspeed:
        return []
    program = shutil.which("nvcc") or str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [
            Finding(
                "CUDA compiler",
                "warning",
                "nvcc is not found; DeepSpeed cannot build kernels",
                f"needed for DeepSpeed only: install the CUDA {built_for} toolkit and set CUDA_HOME",
            )
        ]
    match = re.search(r"release (\d+)\.(\d+)", output)
    version = f"{match[1]}.{match[2]}" if match else "unknown"
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


def check_memory(*, available: int, total: int, cgroup: Path = Path("/sys/fs/cgroup")) -> list[Finding]:
    """Checks free memory (in bytes), the container's limit, and whether the kernel killed processes for memory."""
    remedy = "a process killed with signal 9 ran out of memory: fewer processes, or a smaller micro_batch_size"
    findings = []
    limit = _read_number(cgroup / "memory.max")
    if limit is not None and limit < total:
        used = _read_number(cgroup / "memory.current") or 0
        total, available = limit, min(available, limit - used)
    status: Literal["ok", "warning"] = "warning" if available < 2 * GB else "ok"
    text = f"{available / GB:.1f} of {total / GB:.1f} GB available"
    findings.append(Finding("memory", status, text, remedy if status == "warning" else ""))
    killed = re.search(r"^oom_kill (\d+)", "\n".join(lines_of(cgroup / "memory.events")), re.M)
    if killed and int(killed[1]):
        text = f"{killed[1]} processes of this container were killed for memory since it started"
        findings.append(Finding("memory", "warning", text, remedy))
    return findings


def check_shared_memory(folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Checks the size of shared memory, through which NCCL and gloo exchange gradients."""
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


def check_disk(folder: Path) -> list[Finding]:
    """Checks free disk space at `folder`. A BERT-base checkpoint takes 1.8 GB."""
    free = shutil.disk_usage(folder).free
    remedy = (
        "free some space, or put stores and runs elsewhere; `checkpoint.keep` limits how many checkpoints a run keeps"
    )
    text = f"{free / GB:.1f} GB free at {folder}"
    if free < GB:
        return [Finding("disk", "error", text, remedy)]
    return [Finding("disk", "warning", text, remedy) if free < 20 * GB else Finding("disk", "ok", text)]


def check_port(number: int = 29500) -> list[Finding]:
    """Checks that the port of the rendezvous is free on this machine."""
    with socket.socket() as candidate:
        try:
            candidate.bind(("127.0.0.1", number))
        except OSError:
            return [
                Finding(
                    "port",
                    "warning",
                    f"{number}, where torchrun's processes meet, is in use",
                    "torchrun --master-port 0 takes a free port; or end the run that still uses this one",
                )
            ]
    return [Finding("port", "ok", f"{number} is free")]


def check_network(environment: Mapping[str, str], interfaces: Sequence[str]) -> list[Finding]:
    """Checks that the network interfaces which the environment names for NCCL and gloo exist."""
    findings = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for name in environment.get(variable, "").split(","):
            if name and name[0] not in "^=" and not any(interface.startswith(name) for interface in interfaces):
                known = ", ".join(sorted(interfaces))
                text = f"{variable}={name}: there is no such network interface"
                findings.append(Finding("network", "error", text, f"set it to one of {known}, or unset it"))
    return findings


def check_build_locks(folder: Path) -> list[Finding]:
    """Checks for locks of unfinished kernel builds below `folder`.

    A build waits for a lock forever, even if the process that took the lock is dead.
    """
    findings = []
    try:
        locks = sorted(folder.rglob("lock")) if folder.is_dir() else []
    except PermissionError:
        remedy = "needed for DeepSpeed only: set TORCH_EXTENSIONS_DIR to a folder that you may write to"
        return [Finding("build locks", "warning", f"{folder} belongs to another user; kernels cannot be built", remedy)]
    for lock in locks:
        age = time.time() - lock.stat().st_mtime
        holders = _holders(lock)
        text = f"{lock}, {age / 60:.0f} minutes old"
        command = f"rm {lock}"
        if not holders:
            remedy = f"a start that hangs at a kernel build waits for this lock; remove it: {command}"
            findings.append(Finding("build locks", "error", f"{text}, held by no process on this machine", remedy))
        elif age > OLD_LOCK_SECONDS:
            remedy = f"if process {holders[0]} is stuck, end it, then: {command}"
            findings.append(Finding("build locks", "warning", f"{text}, held by process {holders[0]}", remedy))
        else:
            findings.append(Finding("build locks", "ok", f"{text}: process {holders[0]} is building"))
    return findings or [Finding("build locks", "ok", "no kernel build is waiting")]


def _holders(file: Path) -> list[int]:
    """Returns the ids of the processes that have `file` open, among those that this user may inspect."""
    holders = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(link.readlink() == file for link in (folder / "fd").iterdir()):
                holders.append(int(folder.name))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return holders


def check_products(device: torch.device) -> list[Finding]:
    """Names the device, and the precisions in which it multiplies slowly, with how many times slower than in fp32."""
    from terakoya.toolkit.fast_products import DTYPES, describe_processor, multiplies_fast, slowdown

    name = describe_processor(device)
    slow = {each: slowdown(each, device) for each in DTYPES if not multiplies_fast(each, device)}
    if not slow:
        return [Finding("products", "ok", f"{name}: bf16 and fp16 as fast as fp32")]
    factors = ", ".join(f"{precision} {factor:.0f} x slower" for precision, factor in slow.items())
    return [Finding("products", "ok", f"{name}: {factors} than fp32")]


def check_threads(environment: Mapping[str, str], *, cores: int) -> list[Finding]:
    """Checks that the processes of a node do not start more threads than it has cores."""
    setting = environment.get("OMP_NUM_THREADS", "")
    processes = environment.get("LOCAL_WORLD_SIZE", "1")
    if setting and not setting.isdigit():
        return [
            Finding("threads", "error", f"OMP_NUM_THREADS={setting} is not a number", "set it to a number, or unset it")
        ]
    count = int(setting or cores) * (int(processes) if processes.isdigit() else 1)
    text = f"{cores} cores, OMP_NUM_THREADS {setting or 'not set'}"
    if count > cores:
        remedy = "too many threads slow training down: set OMP_NUM_THREADS = cores / processes of the node"
        return [Finding("threads", "warning", f"{text}: {count} threads on {cores} cores", remedy)]
    return [Finding("threads", "ok", text)]


def _read_number(file: Path) -> int | None:
    text = "".join(lines_of(file))
    return int(text) if text.isdigit() else None
