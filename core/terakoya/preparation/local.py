"""Raw text to token store: in parallel, resumable, with the same bytes for any number of processes.

The corpus is cut into blocks that depend on its files alone; each becomes a part on disk; when all are there they are
joined. What was finished before a kill is recognised by hashes of corpus, tokenizer and options. What other ways to
share the blocks have in common with this one is in `preparation.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path

from terakoya.components import Tokenizer
from terakoya.corpus.corpus import Block, Corpus
from terakoya.errors import UserError
from terakoya.preparation.chat_template import ChatTemplate
from terakoya.preparation.encoding import BlockEncoder, Task, encode_block, source_name, start_worker
from terakoya.preparation.job import Preparation, by_reason, limit
from terakoya.preparation.sharding import Shard, ShardBlocks
from terakoya.process_pool import workers
from terakoya.store.assembly import Totals
from terakoya.store.parts import PartFacts, read_part
from terakoya.store.token_store import StoreFacts, Unit

logger = logging.getLogger("terakoya")

Progress = Callable[[int, int], None]


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    out: Path,
    *,
    unit: Unit = "document",
    append_eos: bool = False,
    processes: int = 1,
    max_rejects: int | float = 0.01,
    force: bool = False,
    shard: Shard | None = None,
    template: ChatTemplate | None = None,
    progress: Progress | None = None,
) -> StoreFacts:
    """Encodes `corpus` with the tokenizer in `tokenizer_folder` into the token store `out`.

    Continues what an interrupted call with the same input left; returns at once if the store is finished.
    `max_rejects`: how many documents may be quarantined, a count (int) or a share of all documents (float).
    `force` throws away what `out` holds of another store. `shard` encodes one share of the corpus; merged in order, the
    stores of all shares are the store of the corpus. `progress(done_bytes, total_bytes)` is called now and then.

    Raises UserError when `out` holds something else or is in use, the disk is too small, too many documents are
    rejected, ids do not fit the vocabulary, or a process dies.
    """
    if processes < 1:
        raise UserError(f"processes: expected at least 1, got {processes}")
    preparation = Preparation.of(
        corpus,
        tokenizer,
        tokenizer_folder,
        out,
        unit=unit,
        append_eos=append_eos,
        max_rejects=max_rejects,
        shard=shard,
        template=template,
    )
    with preparation.held():
        if (facts := preparation.finished(force=force)) is not None:
            return facts
        encoder = BlockEncoder(preparation.task)
        blocks = preparation.blocks()
        preparation.begin(encoder)
        totals = _encode_all(preparation.task, encoder, blocks, processes, max_rejects, progress)
        return preparation.finish(totals, encoder, extent=blocks.extent)


# ---------------------------------------------------------------------------------------------------------- encoding


def _encode_all(
    task: Task,
    encoder: BlockEncoder,
    blocks: ShardBlocks,
    processes: int,
    max_rejects: int | float,
    progress: Progress | None,
) -> Totals:
    """Makes every part that is not there yet. Returns the sums over all parts."""
    totals, kept, done, warned = Totals(), 0, 0, False
    with _workers(task, encoder, processes) as submit:
        waiting: dict[Future[PartFacts], int] = {}

        def collect(*, at_most: int) -> None:
            nonlocal done, warned
            while len(waiting) > at_most:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    totals.add(future.result())
                    done += waiting.pop(future)
                if progress is not None:
                    progress(min(done, blocks.disk_bytes), blocks.disk_bytes)
                seen = totals.documents + totals.rejected.total()
                if not warned and seen >= 1000 and totals.rejected.total() > limit(max_rejects, seen):
                    warned = True
                    logger.warning("many rejects so far: %s", by_reason(totals))

        for number, block in enumerate(blocks):
            facts = read_part(task.parts, number)
            if facts is not None and facts.source == source_name(block):
                totals.add(facts)
                kept += 1
                done += block.disk_bytes
                continue
            waiting[submit(number, block)] = block.disk_bytes
            collect(at_most=2 * processes - 1)
        collect(at_most=0)
    if kept:
        logger.info("%d of %d parts were there already", kept, totals.parts)
    if progress is not None:
        progress(blocks.disk_bytes, blocks.disk_bytes)
    return totals


@contextmanager
def _workers(task: Task, encoder: BlockEncoder, processes: int) -> Iterator[Callable[[int, Block], Future[PartFacts]]]:
    """What encodes blocks: this process if `processes` is 1, else as many new ones, none of which outlives this one."""

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
