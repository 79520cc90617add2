"""What a run logs of this process's GPU: its memory, its power, its temperature, and whether the host keeps it busy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

UNKNOWN = (ImportError, OSError, RuntimeError, AssertionError)
"""What torch raises where NVIDIA's library is not installed, or does not know a value of this card."""

FEWEST_STEPS = 5
"""Steps of which a share is worth saying."""
MOST_WAITS = 0.9
"""The share of steps from which on the host is what limits a run."""


class Backlog:
    """Whether a GPU has work left when the host has started all of a step.

    The sign is the event behind the step's forward pass. A GPU that is slower than its host has not reached it when the
    backward pass and the update have been started, too; one that has, waits for the host. The first step after a
    record, for which the host has waited, says nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event: Any = None
        self._steps = -1
        self._waits = 0

    def after_forward(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns `loss_fn`, which then also marks the end of the forward pass."""
        if not self._on_gpu:
            return loss_fn

        def with_event(*arguments: Any, **options: Any) -> Tensor:
            loss = loss_fn(*arguments, **options)
            self._event = torch.cuda.Event()
            self._event.record()
            return loss

        return with_event

    def step_started(self) -> None:
        """Looks how far the GPU is, once the host has started all of a step. Does not wait for it."""
        if self._event is not None:
            self._waits += self._steps >= 0 and self._event.query()
            self._steps += 1
            self._event = None

    def take_waits(self) -> float | None:
        """Returns the share of the steps since the last call, but the first, in which the GPU had no work left; None
        where too few are known."""
        steps, waits = self._steps, self._waits
        self._steps, self._waits = -1, 0
        return waits / steps if steps >= FEWEST_STEPS else None


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
        except UNKNOWN:
            continue
    return values


def describe(values: Mapping[str, float]) -> str:
    """Returns what is known of the GPU in logged `values`, for a line; empty where nothing is."""
    forms = (("gpu_memory", "{:.1f} GB"), ("gpu_power", "{:.0f} W"), ("gpu_temperature", "{:.0f} °C"))
    known = [form.format(values[name]) for name, form in forms if name in values]
    return f"GPU {' '.join(known)}" if known else ""
