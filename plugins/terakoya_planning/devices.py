"""Devices that a run can be estimated for: their peak speed and their memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from terakoya.errors import UserError, nearest
from terakoya.toolkit.fast_products import Precision, fastest_precision
from terakoya.training.throughput import PEAK_TFLOPS, peak_tflops

GIB = 2**30
MEMORY_GIB = {
    "h100": 80, "h200": 141, "h100-nvl": 94, "gh200": 96, "b200": 180, "gb200": 186, "h800": 80, "h20": 96,
    "a100-80gb": 80, "a100-40gb": 40, "a100": 40, "a800": 80, "a40": 48, "a30": 24, "a10": 24, "a10g": 24,
    "a6000": 48, "rtx-6000-ada": 48, "l40s": 48, "l40": 48, "l4": 24, "rtx-5090": 32, "rtx-4090": 24, "rtx-3090": 24,
    "mi300x": 192, "mi325x": 256, "mi250x": 64,
}  # fmt: skip
"""Memory in GiB of the devices of `throughput.PEAK_TFLOPS`, by their name on the command line, as their makers state
it."""
CPU = "cpu"


@dataclass(frozen=True)
class Device:
    """A device: its name, its memory in bytes and its peak in TFLOP/s; None where unknown."""

    name: str
    memory: int | None
    peak_tflops: float | None

    @property
    def gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.name != CPU

    def is_named(self, name: str) -> bool:
        """Whether `name`, as a driver gives it, is that of this device: "NVIDIA H100 80GB HBM3" is that of "h100"."""
        return _words(self.name) <= _words(name)


def find_device(name: str) -> Device:
    """Returns the device `name`, such as "h100", "a100-80gb", "NVIDIA H100 80GB HBM3" or "cpu". Raises UserError if it
    is unknown."""
    if name.lower() == CPU:
        return Device(CPU, None, None)
    peak = peak_tflops(name.replace("-80gb", "").replace("-40gb", "").replace("-", " "))
    if peak is None:
        letters = re.sub("[^a-z0-9]", "", name.lower())
        same = [known for known in MEMORY_GIB if known.replace("-", "") == letters]
        raise UserError(f'device "{name}": not known{nearest(name.lower(), same or [*MEMORY_GIB, CPU])}')
    longest_first = sorted(MEMORY_GIB, key=len, reverse=True)
    match = next((known for known in longest_first if _words(known) <= _words(name)), None)
    return Device(name, MEMORY_GIB[match] * GIB if match else None, peak)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def local_device() -> Device:
    """Returns the device that this machine would train on."""
    import psutil

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device(properties.name, properties.total_memory, peak_tflops(properties.name))
    return Device(CPU, psutil.virtual_memory().total, None)


def is_here(device: Device) -> bool:
    """Whether this machine would train on `device`."""
    local = local_device()
    return device.gpu == local.gpu and device.is_named(local.name)


def precision_on(device: Device) -> Precision:
    """Returns what the precision "auto" means on `device`; every card of `MEMORY_GIB` has bf16."""
    if device.gpu and not is_here(device):
        return "bf16"
    return fastest_precision(torch.device("cuda", 0) if device.gpu else torch.device(CPU))


assert {name.split("-")[0].upper() for name in MEMORY_GIB} - {"RTX"} <= {w for words, _ in PEAK_TFLOPS for w in words}
