"""The speed of a run in numbers that can be compared: tokens/s, samples/s, TFLOP/s, share of the devices' peak."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from terakoya.components import Architecture, Objective
from terakoya.components.flops import mean_context
from terakoya.distributed.context import DistributedContext
from terakoya.rows.row_source import RowSource

PEAK_TFLOPS: Sequence[tuple[frozenset[str], float]] = tuple(
    (frozenset(name.split()), peak)
    for name, peak in (
        ("GB200", 2500.0), ("B200", 2250.0), ("B100", 1800.0),
        ("H200 NVL", 836.0), ("H200", 989.0), ("GH200", 989.0),
        ("H100 NVL", 835.0), ("H100 PCIE", 756.0), ("H100", 989.0), ("H800 PCIE", 756.0), ("H800", 989.0),
        ("H20", 148.0), ("A100", 312.0), ("A800", 312.0), ("A40", 149.7), ("A30", 165.0), ("A10", 125.0),
        ("A10G", 70.0), ("A6000", 154.8), ("RTX 6000 ADA", 364.2), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0),
        ("RTX 5090", 209.5), ("RTX 4090", 165.2), ("RTX 3090", 71.0),
        ("MI325X", 1307.4), ("MI300X", 1307.4), ("MI250X", 191.5),
    )
)  # fmt: skip
"""Words of a device's name and its peak in TFLOP/s: dense bfloat16 products added in float32, as its maker states it;
half of that for an MI250X, which appears as two devices. The first entry whose words are all in the name counts."""

SAMPLED_ROWS = 256
"""Rows of each store from which the mean context length is measured."""


@dataclass(frozen=True)
class Throughput:
    """Turns tokens and seconds into rates.

    Attributes:
        flops_per_token: operations of one real token, forward and backward, in all models of the objective.
        devices: the name of each process's device.
        peak: the sum of the devices' peaks in TFLOP/s; None where one is unknown, as on a CPU.
    """

    flops_per_token: float
    devices: tuple[str, ...]
    peak: float | None

    def values(self, *, tokens: int, samples: int, seconds: float) -> dict[str, float]:
        """Returns the rates of `seconds` in which all processes took `tokens` real tokens in `samples` rows.

        `tokens_per_second` and `samples_per_second` are of the whole run, `tflops` is per device (Megatron's
        "throughput per GPU"), `mfu` is the share of the peak that necessary operations use, 0 to 1.
        """
        seconds = max(seconds, 1e-9)
        total = self.flops_per_token * tokens / seconds / 1e12
        rates = {
            "tokens_per_second": tokens / seconds,
            "samples_per_second": samples / seconds,
            "tflops": total / len(self.devices),
        }
        return rates if self.peak is None else rates | {"mfu": total / self.peak}

    def facts(self) -> Mapping[str, object]:
        """Returns the values that the run log records at the start."""
        return {
            "flops_per_token": self.flops_per_token,
            "devices": {name: self.devices.count(name) for name in sorted(set(self.devices))},
            "peak_tflops": self.peak,
        }


def create_throughput(
    objective: Objective,
    architecture: Architecture,
    module: torch.nn.Module,
    mixture: Sequence[tuple[RowSource, float]],
    context: DistributedContext,
) -> Throughput:
    """Returns the `Throughput` of a run, from its whole `module` and some rows of the stores of its `mixture`;
    collective."""
    sources, weights = zip(*mixture, strict=True)
    mean_context_length = float(np.average([_mean_context(source) for source in sources], weights=weights))
    flops = objective.flops_per_token(module, architecture, context=mean_context_length)
    device = context.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    devices = tuple(context.gather(name))
    peaks = [peak_tflops(name) for name in devices]
    known = [peak for peak in peaks if peak is not None]
    return Throughput(flops, devices, sum(known) if len(known) == len(peaks) else None)


def peak_tflops(name: str) -> float | None:
    """Returns the peak of the device `name` in TFLOP/s; None where it is not in the table, or part of a card (MIG)."""
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    return next((peak for known, peak in PEAK_TFLOPS if known <= words and "MIG" not in words), None)


def _mean_context(source: RowSource) -> float:
    """Returns how many positions of its own document a position can attend to, from rows sampled evenly in `source`."""
    count = len(source)
    rows = source.load(0, np.unique(np.linspace(0, count - 1, min(count, SAMPLED_ROWS)).astype(np.int64)))
    return mean_context(rows.document_ids)
