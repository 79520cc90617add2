"""What computes the module of a run: the backend of attention, and compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.rows.loader import Loader
from terakoya.toolkit.architectures import attention
from terakoya.training.model import compilation
from terakoya.training.run_log import RunLog
from terakoya.training.run_plan import SAMPLED_ROWS


@dataclass(frozen=True)
class Kernels:
    """What computes a module, the same on all ranks: the backend of attention, and what `compilation.Choice` says."""

    attention: str
    compiled: compilation.Mode
    cuda_graphs: bool


def choose_kernels(
    parameters: Parameters, module: nn.Module, loader: Loader, context: DistributedContext, run_log: RunLog
) -> Kernels:
    """Returns what computes `module`, and says what "auto" would choose on another machine or for another run.
    Raises as `compilation.choose`."""
    backend = choose_attention(parameters, module, loader, context.device, say=run_log.print)
    choice = compilation.choose(parameters, context.device, processes=context.world_size)
    if choice.note is not None:
        run_log.print(choice.note)
    return Kernels(backend, choice.mode, choice.cuda_graphs)


def choose_attention(
    parameters: Parameters, module: nn.Module, loader: Loader, device: torch.device, *, say: Callable[[str], None]
) -> str:
    """Returns the attention backend of `module`. On a GPU it says why "auto" is not flash, and what that costs."""
    facts = attention.find_facts(module, parameters.precision, parameters.architecture.document_masking)
    length = max(each.sequence_length for each in parameters.all_data)
    backend = attention.choose(parameters.attention, device=device, length=length, **facts)
    obstacle = attention.why_not_flash(device=device, **facts)
    if parameters.attention == "auto" and device.type == "cuda" and obstacle:
        factor = attention.wasted_scores(loader.load(0, SAMPLED_ROWS).document_ids)
        say(
            f"attention sdpa, not flash: {obstacle}. sdpa computes {factor:.1f} times the scores that the documents of "
            "a row need, and reads a mask in each layer"
        )
    return backend
