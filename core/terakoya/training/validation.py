"""Validation: the same rows with the same masks every time, divided among all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from torch import Tensor

from terakoya.components import Batch, Objective
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import RankBatch, split_evenly
from terakoya.rows.loader import Prefetcher
from terakoya.rows.row_source import RowSource
from terakoya.runs.metrics import store_names
from terakoya.training.batches import BatchMaker, collate_rows, to_device
from terakoya.training.engines.compared_examples import compare_examples, sums_of_examples
from terakoya.training.engines.engine import Engine
from terakoya.training.loss import Meter, to_bits
from terakoya.training.run import Run

DEFAULT_BATCHES = 50
"""Batches per validation where the parameters have no `evaluation`."""


def validate_all(
    engine: Engine, run: Run, validation: Mapping[str, RowSource], maker: BatchMaker
) -> Mapping[str, Mapping[str, float]]:
    """Validates on every store of `validation` and logs the means. Returns those of rank 0 by store: sums over ranks
    may be rounded differently, but all ranks need one learning rate."""
    evaluation, short_names = run.parameters.evaluation, store_names(validation)
    batches = evaluation.batches if evaluation else DEFAULT_BATCHES
    numbers: dict[str, Mapping[str, float]] = {}
    for name, source in validation.items():
        values = validate(engine, run.context, source, run.objective, maker, batches=batches)
        numbers[name] = values
        run.write("validation", store=name, tokens=run.consumed_tokens, **values)
        run.run_log.track(run.step, {f"validation/{short_names[name]}/{key}": value for key, value in values.items()})
    run.run_log.show_validation(run.step, numbers)
    found: Mapping[str, Mapping[str, float]] = run.context.broadcast(numbers)
    return found


def validate(
    engine: Engine,
    context: DistributedContext,
    source: RowSource,
    objective: Objective,
    maker: BatchMaker,
    *,
    batches: int,
) -> dict[str, float]:
    """Returns the means of all terms over `batches` x global batch rows of `source`, or all where it has no more, and
    what they are in bits for each character and byte of the store's text. `maker` makes the batches of the run.

    The rows are spread evenly over `source`, whose first ones may be those of its longest documents. They are masked by
    their own keys, so that two validations differ only by the weights. Every rank runs the same number of forward
    passes, as engines that shard weights gather them there. An objective that compares examples compares those of each
    global batch.
    """
    rank_batch, compiled = maker.plan.validation_batch, maker.compiled
    load = partial(to_device, device=context.device, flash=maker.flash, compiled=compiled)
    rows = min(len(source), batches * rank_batch.global_rows)
    spread, terms = source.spread(rows), objective.terms()
    meter = Meter(terms, context.device, objective.derive_metrics)
    names = sorted({term.count for term in terms.values()})
    compares = objective.compares_examples
    parts = list(_divide_rows(rows, rank_batch.global_rows if compares else rows, rank_batch, context))
    counts = [0] * len(names)

    def collate(micro: int) -> tuple[bool, Batch]:
        positions, _ = parts[micro]
        empty = len(positions) == 0  # other ranks have more rows: run a row that does not count
        loaded = source.blank_row() if empty else source.load(0, spread[positions])
        size = rank_batch.micro_batch_size if compiled else len(loaded)
        return empty, collate_rows(objective, maker.vocabulary, loaded, size, source)

    def compare(batches: Mapping[int, Batch]) -> list[Mapping[str, Tensor]]:
        loads = {micro: partial(load, batch) for micro, batch in batches.items()}
        return [sums_of_examples(each) for each in compare_examples(engine, context, objective, loads).values()]

    engine.module.eval()
    try:
        with Prefetcher(collate, 0, last_step=len(parts)) as batches_ahead:
            waiting: dict[int, tuple[bool, Batch]] = {}
            for micro, (empty, batch) in enumerate(batches_ahead):
                waiting[micro] = empty, batch
                if compares and not parts[micro][1]:
                    continue
                compared = (
                    compare({key: each for key, (_, each) in waiting.items()})
                    if compares
                    else [engine.evaluate(load(batch))]
                )
                for (empty, batch), sums in zip(waiting.values(), compared, strict=True):
                    if not empty:
                        meter.add_sums(sums)
                        if context.is_replica_leader:
                            counts = [count + batch.counts[name] for count, name in zip(counts, names, strict=True)]
                    elif not meter.seen:
                        meter.seen.update(sums)
                waiting.clear()
    finally:
        engine.module.train()
    meter.add_counts(dict(zip(names, context.sum_counts(counts), strict=True)))
    means = meter.take_means(context.sum_on_device(meter.local_sums()))
    return means | to_bits(means, terms, source.store.text_per_token)


def _divide_rows(
    rows: int, group: int, rank_batch: RankBatch, context: DistributedContext
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields the rows of each of this rank's micro-batches, and whether it is the last one of its `group` of rows, each
    of which is divided among all ranks. Every rank has as many, the last ones of some ranks without rows."""
    size, replicas = rank_batch.micro_batch_size, context.topology.num_replicas
    for first in range(0, rows, max(group, 1)):
        count = min(group, rows - first)
        start, stop = split_evenly(count, replicas, context.replica)
        largest_start, largest_stop = split_evenly(count, replicas, 0)
        micro_steps = -(-(largest_stop - largest_start) // size)
        for micro in range(micro_steps):
            begin = start + micro * size
            yield first + np.arange(begin, min(begin + size, stop)), micro == micro_steps - 1
