"""How fast a run goes, in numbers that can be compared: tokens, samples, TFLOP/s, share of the devices' peak."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from terakoya.components import Architecture, Objective
from terakoya.components.flops import mean_context
from terakoya.rows.row_source import RowSource
from terakoya.training.distributed.context import DistributedContext

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
of an MI250X, which shows as two devices, half. The first whose words are all there counts."""

SAMPLED_ROWS = 256
"""Rows of each store whose documents say how long a context is."""


@dataclass(frozen=True)
class Throughput:
    """What turns tokens and seconds into TFLOP/s.

    Attributes:
        flops_per_token: operations of one real token, forward and backward, all models of the objective.
        devices: the name of each process's device.
        peak: the sum of their peaks in TFLOP/s; None where one is not known, as on a CPU.
    """

    flops_per_token: float
    devices: tuple[str, ...]
    peak: float | None

    def values(self, *, tokens: int, samples: int, seconds: float) -> dict[str, float]:
        """Rates over `seconds` in which all processes took `tokens` real tokens in `samples` rows.

        `tokens_per_second` and `samples_per_second` are the whole run's, `tflops` is a device's share (Megatron's
        "throughput per GPU"), `mfu` the share of the peak that is used for work that must be done, 0 to 1.
        """
        seconds = max(seconds, 1e-9)
        total = self.flops_per_token * tokens / seconds / 1e12
        rates = {
            "tokens_per_second": tokens / seconds,
            "samples_per_second": samples / seconds,
            "tflops": total / len(self.devices),
        }
        return rates if self.peak is None else rates | {"mfu": total / self.peak}


def measure(
    objective: Objective,
    architecture: Architecture,
    module: torch.nn.Module,
    sources: Sequence[RowSource],
    weights: Sequence[float],
    context: DistributedContext,
) -> Throughput:
    """What the run's work is, from its whole `module` and some rows of its stores. Every rank calls it."""
    mean_context_length = float(np.average([_context(source) for source in sources], weights=weights))
    flops = objective.flops_per_token(module, architecture, context=mean_context_length)
    devices = tuple(context.gather(device_name(context.device)))
    peaks = [peak_tflops(name) for name in devices]
    known = [peak for peak in peaks if peak is not None]
    return Throughput(flops, devices, sum(known) if len(known) == len(peaks) else None)


def device_name(device: torch.device) -> str:
    """The device's name as its driver gives it, "cpu" for a processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_tflops(name: str) -> float | None:
    """The peak of the device `name`, None where it is not in the table."""
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    return next((peak for wanted, peak in PEAK_TFLOPS if wanted <= words), None)


def _context(source: RowSource) -> float:
    """How many positions of its document a position has, from rows spread over `source`."""
    count = len(source)
    rows = source.load(0, np.unique(np.linspace(0, count - 1, min(count, SAMPLED_ROWS)).astype(np.int64)))
    return mean_context(rows.document_ids)


def described(throughput: Throughput) -> Mapping[str, object]:
    """For the run's record."""
    return {
        "flops_per_token": throughput.flops_per_token,
        "devices": {name: throughput.devices.count(name) for name in sorted(set(throughput.devices))},
        "peak_tflops": throughput.peak,
    }
