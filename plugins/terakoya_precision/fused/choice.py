"""Whether a run takes the fused kernels: where its model has parts that do, and every rank's GPU passes the check."""

from __future__ import annotations

import torch
from torch import nn

from terakoya.distributed.context import DistributedContext
from terakoya.training.model import compilation
from terakoya_precision.bf16_stream import fused_widths
from terakoya_precision.fused import self_check


def choose(module: nn.Module, context: DistributedContext, *, setting: str) -> tuple[bool, str | None]:
    """Returns whether parts of `module` take fused kernels, and why they do not where "auto" would take them on another
    machine: the same on every rank; collective where it depends on the GPU. The bf16 stream is taken."""
    widths = fused_widths(module)
    if setting == "off" or context.device.type != "cuda" or not widths:
        return False, None
    reasons = context.gather(reason_against(context.device, widths))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return False, reason if context.world_size == 1 else f"rank {rank}: {reason}"
    return True, None


def reason_against(device: torch.device, widths: list[int]) -> str | None:
    """Returns why `device` cannot take the kernels for hidden states of `widths`; None where it can."""
    return compilation.missing_tools(device) or self_check.failure(device, widths)
