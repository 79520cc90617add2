"""Validation: the same rows with the same masks every time, divided among all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from terakoya.components import Batch, LossTerm, Objective
from terakoya.components.vocabulary import Vocabulary
from terakoya.rows.loader import Prefetcher
from terakoya.rows.row_source import RowSource
from terakoya.training.batches import collate_rows, to_device
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.distributed.topology import RankBatch, split_evenly
from terakoya.training.engines.engine import Engine
from terakoya.training.loss import Meter, to_bits, total_counts


def validate(
    engine: Engine,
    context: DistributedContext,
    source: RowSource,
    objective: Objective,
    vocabulary: Vocabulary,
    rank_batch: RankBatch,
    *,
    batches: int,
    flash: bool,
    compiled: bool = False,
) -> dict[str, float]:
    """Returns the means of all terms over the first `batches` x global batch rows of `source`, or fewer if it ends, and
    what they are in bits for each character and byte of the store's text.

    Rows are read in order and masked by their own keys, so that two validations differ only by the weights. Every rank
    runs the same number of forward passes, as engines that shard weights gather them there.
    """
    rows = min(len(source), batches * rank_batch.global_rows)
    terms: Mapping[str, LossTerm] = objective.terms()
    meter = Meter(terms, context.device, objective.derive_metrics)
    names = sorted({term.count for term in terms.values()})
    start, stop = split_evenly(rows, context.topology.num_replicas, context.replica)
    largest_start, largest_stop = split_evenly(rows, context.topology.num_replicas, 0)
    micro_steps = -(-(largest_stop - largest_start) // rank_batch.micro_batch_size)
    counts = [0] * len(names)

    def collate(micro: int) -> tuple[bool, Batch]:
        first = start + micro * rank_batch.micro_batch_size
        positions = np.arange(first, min(first + rank_batch.micro_batch_size, stop))
        empty = len(positions) == 0  # other ranks have more rows: run a row that does not count
        loaded = source.load(0, np.zeros(1, dtype=np.int64) if empty else positions)
        size = rank_batch.micro_batch_size if compiled else len(loaded)
        return empty, collate_rows(objective, vocabulary, loaded, size, source)

    engine.module.eval()
    try:
        with Prefetcher(collate, 0, last_step=micro_steps) as batches_ahead:
            for empty, batch in batches_ahead:
                sums = engine.evaluate(to_device(batch, context.device, flash=flash, compiled=compiled))
                if not empty:
                    meter.add_sums(sums)
                    if not context.is_replica_leader:
                        continue
                    counts = [total + count for total, count in zip(counts, total_counts([batch], names), strict=True)]
                elif not meter.seen:
                    meter.seen.update(sums)
    finally:
        engine.module.train()
    meter.add_counts(dict(zip(names, context.sum_counts(counts), strict=True)))
    means = meter.take_means(context.sum_on_device(meter.local_sums()))
    return means | to_bits(means, terms, source.store.text_per_token)
