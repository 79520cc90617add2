"""Encodes raw text into a token store: in parallel, resumable, with the same bytes for any number of processes.

The corpus is cut into blocks that depend only on its files; each block becomes a part on disk; all parts are then
joined. Hashes of corpus, tokenizer and options identify the parts that an interrupted call has finished. `job.py` holds
what this engine shares with `datatrove.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager

from terakoya.corpus.corpus import Block
from terakoya.corpus.rejects import describe_rejects, has_many_rejects
from terakoya.errors import UserError
from terakoya.preparation.encoding import BlockEncoder, EncodingTask, encode_block, source_name, start_worker
from terakoya.preparation.job import PrepareJob
from terakoya.preparation.sharding import ShardBlocks
from terakoya.process_pool import workers
from terakoya.store.parts import PartFacts, read_part
from terakoya.store.token_store import Counts, StoreFacts

logger = logging.getLogger("terakoya")

Progress = Callable[[int, int], None]


def prepare_locally(job: PrepareJob, *, progress: Progress | None = None) -> StoreFacts:
    """Encodes and joins `job` in processes of this machine. `progress(done_bytes, total_bytes)` is called regularly.
    Continues an interrupted call with the same input; returns at once if the store is finished. Raises UserError if
    `out` holds something else or is in use, if the disk is too small, for too many rejected documents, for ids outside
    the vocabulary, and if a process dies."""
    processes = job.options.process_count
    if processes < 1:
        raise UserError(f"processes: expected at least 1, got {processes}")
    with job.lock_folder():
        if (facts := job.find_finished()) is not None:
            return facts
        encoder = BlockEncoder(job.task)
        blocks = job.blocks()
        job.begin(encoder)
        totals, parts = _encode_all(job, encoder, blocks, processes, progress)
        return job.finish(totals, parts, encoder, extent=blocks.extent)


# ---------------------------------------------------------------------------------------------------------- encoding


def _encode_all(
    job: PrepareJob, encoder: BlockEncoder, blocks: ShardBlocks, processes: int, progress: Progress | None
) -> tuple[Counts, int]:
    """Writes every missing part. Returns the sums over all parts, and their number."""
    totals, existing, done, warned = Counts(), 0, 0, False
    parts = 0
    with _workers(job.task, encoder, processes) as submit:
        waiting: dict[Future[PartFacts], int] = {}

        def collect(*, at_most: int) -> None:
            nonlocal done, totals, warned
            while len(waiting) > at_most:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    totals += future.result().counts
                    done += waiting.pop(future)
                if progress is not None:
                    progress(min(done, blocks.disk_bytes), blocks.disk_bytes)
                documents = job.count_documents(totals)
                is_large = documents + sum(totals.rejected.values()) >= 1000
                if not warned and is_large and has_many_rejects(totals.rejected, documents, job.options.max_rejects):
                    warned = True
                    logger.warning("many rejects so far: %s", describe_rejects(totals.rejected, documents))

        for number, block in enumerate(blocks):
            parts = number + 1
            facts = read_part(job.task.parts, number)
            if facts is not None and facts.source == source_name(block):
                totals += facts.counts
                existing += 1
                done += block.disk_bytes
                continue
            waiting[submit(number, block)] = block.disk_bytes
            collect(at_most=2 * processes - 1)
        collect(at_most=0)
    if existing:
        logger.info("%d of %d parts were there already", existing, parts)
    if progress is not None:
        progress(blocks.disk_bytes, blocks.disk_bytes)
    return totals, parts


@contextmanager
def _workers(
    task: EncodingTask, encoder: BlockEncoder, processes: int
) -> Iterator[Callable[[int, Block], Future[PartFacts]]]:
    """Yields a function that encodes a block: in this process if `processes` is 1, else in one of `processes` new ones,
    which end with this one."""

    def encode_here(number: int, block: Block) -> Future[PartFacts]:
        future: Future[PartFacts] = Future()
        future.set_result(encoder.encode(number, block))
        return future

    if processes == 1:
        yield encode_here
        return
    with workers(
        processes,
        start_worker,
        (task,),
        task="prepare",
        remedy="Finished parts are kept: run the same command again and it finishes what is left",
    ) as submit:
        yield lambda number, block: submit(encode_block, number, block)
