"""In which number formats a device multiplies matrices fast, and how it is named.

A processor without instructions for bf16 multiplies bf16 matrices many times slower than float32 ones. What it has is
asked of torch, never timed, where something is decided: a decision that depends on how busy a machine is would change
what a run computes. `slowdown` times it, for messages alone.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITH_BF16 = ("ALL", "DEFAULT", "AVX512_CORE_BF16", "AVX10_1_512", "AVX10_2", "AVX512_CORE_AMX", "AVX10_1_512_AMX")
"""Values of the variable, or the beginnings of some, with which oneDNN uses instructions for bf16
(https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html)."""
MIN_BF16_CAPABILITY = (8, 0)
"""The first NVIDIA GPUs that multiply bf16 (Ampere)."""
PROBE_SIZE = 192


@functools.cache
def multiplies_fast(precision: str, device: torch.device) -> bool:
    """Returns whether `device` multiplies matrices in `precision`, "bf16" or "fp16", about as fast as in float32."""
    if device.type == "cuda":
        is_known = precision == "fp16" or torch.version.hip is not None
        return is_known or torch.cuda.get_device_capability(device) >= MIN_BF16_CAPABILITY
    if device.type != "cpu" or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        supported = torch.ops.mkldnn
        return bool(
            supported._is_mkldnn_bf16_supported() if precision == "bf16" else supported._is_mkldnn_fp16_supported()
        )
    allowed = os.environ.get(ISA_VARIABLE, "ALL").upper()
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or not allowed.startswith(WITH_BF16):
        return False
    if precision == "bf16":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_amx_fp16_supported() and allowed.endswith(("ALL", "DEFAULT", "AMX_FP16"))


def fastest_precision(device: torch.device) -> Precision:
    """Returns what "auto" means on `device`: bf16 where it multiplies that fast, else fp16 on a GPU, fp32 on a CPU."""
    if multiplies_fast("bf16", device):
        return "bf16"
    return "fp16" if device.type == "cuda" else "fp32"


@functools.cache
def slowdown(precision: str, device: torch.device) -> float:
    """Returns how many times slower `device` multiplies matrices of this precision than float32 ones; timed, for about
    50 ms on a slow processor."""
    return _seconds(DTYPES[precision], device) / _seconds(torch.float32, device)


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the seconds of the fastest of three products of square matrices."""
    factor = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype, device=device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        (factor @ factor)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def precision_problems(precision: str, device: torch.device) -> Iterator[str]:
    """Yields a warning where products in `precision`, such as "bf16", are slower on `device` than float32 ones."""
    if precision not in DTYPES or multiplies_fast(precision, device):
        return
    factor = slowdown(precision, device)
    if factor > 1.5:
        yield f"{describe_processor(device)} multiplies {precision} {factor:.0f} times slower than fp32; use fp32 here"


def describe_processor(device: torch.device) -> str:
    """Returns what rounds a product: the GPU's name, or the processor's with the instructions that torch uses on it,
    for example "AMD EPYC 7763 64-Core Processor (AVX2)"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{_model_name()} ({torch.backends.cpu.get_cpu_capability()})"


@functools.cache
def _model_name() -> str:
    """Returns the processor's name as Linux gives it, otherwise as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
