"""What a run logs of this process's GPU: its memory, its power, its temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

UNKNOWN = (ImportError, OSError, RuntimeError, AssertionError)
"""What torch raises where NVIDIA's library is not installed, or does not know a value of this card; the library's own
errors, which are called NVMLError, are derived from Exception."""


def gpu_values(device: torch.device) -> Mapping[str, float]:
    """Returns `gpu_memory`, the most that tensors took so far, in GB; `gpu_power`, in watts; and `gpu_temperature`,
    in degrees Celsius: what is known of `device`, nothing of a CPU. Never waits for the device.

    Power and temperature are NVIDIA's, from the package nvidia-ml-py.
    """
    if device.type != "cuda":
        return {}
    readings: Mapping[str, Callable[[], float]] = {
        "gpu_memory": lambda: torch.cuda.max_memory_allocated(device) / 1e9,
        "gpu_power": lambda: torch.cuda.power_draw(device) / 1000,
        "gpu_temperature": lambda: torch.cuda.temperature(device),
    }
    values: dict[str, float] = {}
    for name, read in readings.items():
        try:
            values[name] = read()
        except Exception as error:
            if not (isinstance(error, UNKNOWN) or type(error).__name__.startswith("NVMLError")):
                raise
    return values


def describe(values: Mapping[str, float]) -> str:
    """Returns what is known of the GPU in logged `values`, for a line; empty where nothing is."""
    forms = (("gpu_memory", "{:.1f} GB"), ("gpu_power", "{:.0f} W"), ("gpu_temperature", "{:.0f} °C"))
    known = [form.format(values[name]) for name, form in forms if name in values]
    return f"GPU {' '.join(known)}" if known else ""
