"""Micro-steps before the first step that change nothing: they settle buckets of gradients, and try CUDA graphs."""

from __future__ import annotations

from functools import partial

import torch

from terakoya.components import Batch, Objective
from terakoya.training.batches import BatchMaker
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import Engine
from terakoya.training.loss import weighted_loss
from terakoya.training.model.compilation import describe

TIMES = 3
"""The first micro-step of a shape runs as usual, the second is recorded, and the third replays that."""
UPDATE_BYTES = 12
"""Room for an update, for each trained weight: two moments and the result of a pass over them, in float32."""


def settle_buckets(engine: Engine, batches: BatchMaker, objective: Objective) -> None:
    """Runs a synchronised backward pass with gradients of zero before the first step; two where DDP reduces gradients.

    DDP rearranges its buckets after its first backward pass, which changes the rounding of sums over three and more
    ranks. After a warm-up every start, fresh or resumed, adds in the same order. The second pass fills the new buckets,
    so that the first step finds gradients at their final addresses.
    """
    if isinstance(engine, DDPEngine) and engine.context.world_size > 1:
        for _ in range(2 if engine.uses_ddp else 1):
            engine.renew_gradients()  # gradients of the first pass would keep its buckets alive
            _pass(engine, batches, objective, batches.dummy())
        engine.clear_gradients()


def find_graph_obstacle(engine: DDPEngine, batches: BatchMaker, objective: Objective, *, validates: bool) -> str | None:
    """Returns why the run cannot take CUDA graphs, as a sentence; None where it can.

    Records and replays a micro-step of the largest step, and a batch without gradients where the run `validates`, and
    looks whether an update would find room beside them.
    """
    device, batch = engine.context.device, batches(batches.plan.largest_step()).real[0]
    try:
        for _ in range(TIMES):
            engine.clear_gradients()  # they would be added up in memory that is written over
            _pass(engine, batches, objective, batch)
        if validates:
            engine.module.eval()
            for _ in range(TIMES):
                engine.evaluate(batches.to_device(batch, device))
        trained = sum(weight.numel() for weight in engine.trainable)
        torch.empty(UPDATE_BYTES * trained, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return "they keep the memory of a micro-step, and the GPU has too little for that"
    except (RuntimeError, AssertionError) as error:  # of the compiler, or of CUDA while it records
        return describe(error)
    finally:
        engine.module.train()
        engine.clear_gradients()
    return None


def _pass(engine: DDPEngine, batches: BatchMaker, objective: Objective, batch: Batch) -> None:
    """Runs forward and backward over `batch`, with gradients of zero."""
    terms = objective.terms()
    loss_of_zero = partial(weighted_loss, terms=terms, counts={term.count: 0 for term in terms.values()})
    tensors = batches.to_device(batch, engine.context.device)
    engine.micro_step(tensors, loss_of_zero, last=True)
