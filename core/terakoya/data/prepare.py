"""Raw text to token store: in parallel, resumable, with the same bytes for any number of processes.

The corpus is cut into blocks that depend on its files alone; each becomes a part on disk; when all are there they are
joined. What was finished before a kill is recognised by hashes of corpus, tokenizer and options.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import multiprocessing
import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import orjson

from terakoya.components import Tokenizer
from terakoya.data.assembly import Totals, assemble, write_rejects
from terakoya.data.corpus import Block, Corpus, Document
from terakoya.data.encoding import BlockEncoder, Task, encode_block, source_name, start_worker
from terakoya.data.parts import PartFacts, read_part
from terakoya.data.resuming import begin, clear, finished_facts
from terakoya.data.sharding import SHARD, SHARD_BLOCKS, Shard, ShardBlocks
from terakoya.data.store import PARTS, StoreFacts, Unit
from terakoya.data.store_writer import Parts, locked
from terakoya.errors import UserError

logger = logging.getLogger("terakoya")

Progress = Callable[[int, int], None]
_SAMPLE_FILES, _SAMPLE_BYTES, _SAMPLE_CHARACTERS = 8, 4 << 20, 30_000
_MIN_BLOCK, _MAX_BLOCK, _MAX_PARTS = 1 << 20, 32 << 20, 50_000


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
    out, tokenizer_folder = Path(out), Path(tokenizer_folder)
    if processes < 1:
        raise UserError(f"processes: expected at least 1, got {processes}")
    if unit not in ("document", "line"):
        raise UserError(f'unit: expected "document" or "line", got "{unit}"')
    if not tokenizer_folder.is_dir():
        raise UserError(f"{tokenizer_folder}: expected a tokenizer's folder, found none")
    options: dict[str, str | int | bool | None] = {
        "unit": unit,
        "append_eos": append_eos,
        "field": corpus.field,
        "documents": corpus.documents,
        "max_document_bytes": corpus.max_document_bytes,
        "block_bytes": _block_bytes(corpus),
        "tokenizer": f"{type(tokenizer).__name__} {tokenizer.model_dump_json()}",
    }
    if corpus.cleaning is not None:
        options.update(corpus.cleaning.facts)
    inputs = {
        "corpus": corpus.fingerprint,
        **{f"tokenizer {name}": value for name, value in sorted(tokenizer.fingerprint(tokenizer_folder).items())},
        "options": hashlib.sha256(orjson.dumps(options)).hexdigest(),
    }
    if shard is not None:
        inputs[SHARD] = options[SHARD] = str(shard)
    blocks = ShardBlocks(corpus, shard or Shard(), block_bytes=_block_bytes(corpus))
    out.mkdir(parents=True, exist_ok=True)
    with locked(out), _ends_explained(out):
        if force:
            clear(out, inputs)
        if (facts := finished_facts(out, inputs, options)) is not None:
            return facts
        task = Task(corpus, pickle.dumps(tokenizer), tokenizer_folder, out / PARTS, unit, append_eos)
        encoder = BlockEncoder(task)
        _check_disk(out, corpus, encoder, blocks.disk_bytes)
        begin(out, inputs, options)
        before = _sizes_and_times(corpus)
        totals = _encode_all(task, encoder, blocks, processes, max_rejects, progress)
        if _sizes_and_times(corpus) != before:
            raise UserError("corpus: a file was changed while it was read; leave the files alone and start again")
        if shard is not None:
            options[SHARD_BLOCKS] = blocks.extent
        _judge(out, totals, max_rejects, shard)
        return assemble(
            out,
            Parts(out, totals),
            vocabulary=encoder.encoder.vocabulary,
            unit=unit,
            eos=encoder.eos,
            tokenizer_folder=tokenizer_folder,
            inputs=inputs,
            options=options,
        )


def _sizes_and_times(corpus: Corpus) -> list[tuple[int, int]]:
    return [(file.stat().st_size, file.stat().st_mtime_ns) for file in corpus.sources]


@contextmanager
def _ends_explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{out}: the disk is full; make room and run the same command again: finished parts are kept"
        ) from error
    except KeyboardInterrupt:
        logger.warning("interrupted; finished parts are kept: run the same command again and it finishes what is left")
        raise


# ---------------------------------------------------------------------------------------------------------- encoding


def _block_bytes(corpus: Corpus) -> int:
    """Bytes of a block: small enough to share a small corpus evenly, large enough for few parts of a large one."""
    wanted = min(corpus.block_bytes, max(_MIN_BLOCK, corpus.total_bytes // 64))
    return max(wanted, min(_MAX_BLOCK, corpus.total_bytes // _MAX_PARTS))


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
                if not warned and seen >= 1000 and totals.rejected.total() > _limit(max_rejects, seen):
                    warned = True
                    logger.warning("many rejects so far: %s", _by_reason(totals))

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
    context = multiprocessing.get_context("spawn")
    worker_end, our_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, start_worker, (task, worker_end))
    try:
        yield lambda number, block: pool.submit(encode_block, number, block)
    except BrokenProcessPool:
        raise UserError(
            f"a worker process died, most likely killed for want of memory; use fewer than --processes {processes}. "
            "Finished parts are kept: run the same command again and it finishes what is left"
        ) from None
    except BaseException:
        our_end.close()  # the workers leave at once
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        our_end.close()
        worker_end.close()


# ------------------------------------------------------------------------------------------------- disk and rejects


def _check_disk(out: Path, corpus: Corpus, encoder: BlockEncoder, disk_bytes: int) -> None:
    """Says how much disk the store will need. UserError if there is not enough."""
    files = corpus.sources[:: -(-len(corpus.sources) // _SAMPLE_FILES)]
    disk = text = sampled = tokens = sequences = 0
    for file in files:
        one = replace(corpus, sources=(file,))
        block = next(one.blocks(block_bytes=_SAMPLE_BYTES), None)
        if block is None:
            continue
        disk += block.disk_bytes
        few, room = [], _SAMPLE_CHARACTERS
        for item in one.read(block):
            if isinstance(item, Document):
                text += len(item.text)
                if room > 0:
                    few.append(item.text[:room])
                    room -= len(few[-1])
        encoded = encoder.sample(few)
        sampled += sum(map(len, few))
        tokens += len(encoded.ids)
        sequences += len(encoded.line_lengths)
    scale = disk_bytes / disk * text / sampled if sampled else 0.0
    itemsize = encoder.encoder.vocabulary.dtype().itemsize
    store = int(scale * (tokens * (itemsize + 1 / 8) + 20 * sequences) * 1.05) + 1_000_000
    need = 2 * store
    there = sum(f.stat().st_size for f in (out / PARTS).glob("*")) if (out / PARTS).exists() else 0
    free = shutil.disk_usage(out).free
    logger.info(
        "about %s tokens; disk needed: %s for the store and as much again while it is made; free at %s: %s",
        f"{int(scale * tokens):,}",
        _megabytes(store),
        out,
        _megabytes(free),
    )
    if need - there > free:
        raise UserError(
            f"{out}: expected about {_megabytes(need - there)} of free disk, got {_megabytes(free)}; make room or "
            "choose an --out on a larger disk"
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _limit(max_rejects: int | float, documents: int) -> float:
    return max_rejects * documents if isinstance(max_rejects, float) else max_rejects


def _by_reason(totals: Totals) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in totals.rejected.most_common())
    return f"{totals.rejected.total():,} of {totals.documents + totals.rejected.total():,} documents ({reasons})"


def _judge(out: Path, totals: Totals, max_rejects: int | float, shard: Shard | None) -> None:
    """Says what was rejected and which special tokens were met. UserError for too many rejects or no document."""
    if totals.literals:
        logger.info(
            "special tokens that stood in the text: %s",
            ", ".join(f"{token} {count:,} times" for token, count in totals.literals.most_common()),
        )
    if not totals.rejected:
        if not totals.tokens:
            hint = "the corpus has none" if shard is None else f"shard {shard} has none; make fewer shards"
            raise UserError(f"{out}: expected at least one document, {hint}")
        return
    write_rejects(out, Parts(out, totals))
    allowed = _limit(max_rejects, totals.documents + totals.rejected.total())
    if totals.rejected.total() > allowed or not totals.tokens:
        raise UserError(
            f"{out}: expected at most {int(allowed):,} rejected documents (--max-rejects {max_rejects}), got "
            f"{_by_reason(totals)}; see {out / 'rejects.jsonl'}, mend the corpus or the options, or allow more: what "
            "is encoded is kept"
        )
    logger.warning("rejected %s; listed in %s", _by_reason(totals), out / "rejects.jsonl")
