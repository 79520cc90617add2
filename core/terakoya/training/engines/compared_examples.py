"""Compares the examples of all micro-batches of all processes, for objectives whose loss needs them all.

See `toolkit/objectives/compared_examples.py` and docs/design/losses.md.

Letters in shapes: E examples, V views of each, H size of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from terakoya.components import Objective
from terakoya.distributed.context import DistributedContext
from terakoya.toolkit.objectives.compared_examples import EMBED, EMBEDDINGS, GRADIENTS, REAL, VALUES
from terakoya.training.engines.engine import Engine


def compare_examples(
    engine: Engine,
    context: DistributedContext,
    objective: Objective,
    batches: Mapping[int, Callable[[], Mapping[str, Tensor]]],
) -> dict[int, dict[str, Tensor]]:
    """Returns, for each of this rank's micro-batches, what to add to its batch: the gradient at its embeddings and the
    values of its examples, compared with those of all micro-batches on all ranks. Collective.

    Args:
        batches: number -> function that returns the micro-batch as the module takes it. Each is called once, in order,
            and seeds dropout, so that the forward that follows draws the same.
    """
    outputs = {}
    for key, load in batches.items():
        outputs[key] = engine.evaluate({**load(), EMBED: torch.ones((), dtype=torch.bool, device=context.device)})
    own = torch.cat([each[EMBEDDINGS] for each in outputs.values()])
    real = torch.cat([each[REAL] for each in outputs.values()])
    everything, all_real, start = _gather(own, real, context)
    everything.requires_grad_()
    values = objective.compare(everything, all_real)
    (gradients,) = torch.autograd.grad(next(iter(values.values())).sum(), everything)
    added = {}
    for key, output in outputs.items():
        part = slice(start, start := start + len(output[REAL]))
        numbers = {f"{VALUES}{name}": each.detach()[part] for name, each in values.items()}
        added[key] = {GRADIENTS: gradients[part], **numbers}
    return added


def sums_of_examples(added: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the sums of the terms over the examples of one micro-batch, whose additions `added` are."""
    return {key.removeprefix(VALUES): each.sum() for key, each in added.items() if key.startswith(VALUES)}


def _gather(own: Tensor, real: Tensor, context: DistributedContext) -> tuple[Tensor, Tensor, int]:
    """Returns the embeddings (E, V, H) of all ranks, in their order, which of them are examples (E,), and the number of
    the first one of this rank."""
    if context.control is None:
        return own, real, 0
    counts = context.gather(len(own))
    padded = own.new_zeros(max(counts), *own.shape[1:])
    flags = real.new_zeros(max(counts))
    padded[: len(own)], flags[: len(own)] = own, real
    everything = [torch.empty_like(padded) for _ in counts]
    all_flags = [torch.empty_like(flags, dtype=torch.uint8) for _ in counts]
    dist.all_gather(everything, padded)
    dist.all_gather(all_flags, flags.to(torch.uint8))
    parts = list(zip(everything, all_flags, counts, strict=True))
    return (
        torch.cat([each[:count] for each, _, count in parts]),
        torch.cat([each[:count] for _, each, count in parts]).bool(),
        sum(counts[: context.rank]),
    )
