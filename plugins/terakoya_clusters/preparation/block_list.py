"""The blocks of a job as a list on disk, so that processes without communication agree on the number of every part."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from terakoya.atomic_files import dump_hashed_json, load_hashed_json, write_atomically
from terakoya.corpus.corpus import Block, Corpus
from terakoya.errors import UserError
from terakoya.preparation.encoding import source_name
from terakoya.preparation.job import PrepareJob
from terakoya.store.parts import PartFacts, read_part

BLOCKS = "blocks.json"
"""File name of the list in the folder of parts. The list and the parts belong to the same input."""


@dataclass(frozen=True)
class BlockList:
    """Every block of a job, in order, without the text.

    Attributes:
        extent: where the first block begins and the last one ends, see `ShardBlocks`.
        has_bytes: for each block whether it carries its bytes: to get them, its file must be cut into blocks again.
    """

    blocks: tuple[Block, ...]
    has_bytes: tuple[bool, ...]
    extent: str

    def read_part(self, parts: Path, number: int) -> PartFacts | None:
        """Returns the facts of the part of block `number`, None if there is no such part."""
        facts = read_part(parts, number)
        return facts if facts is not None and facts.source == source_name(self.blocks[number]) else None

    def missing_parts(self, parts: Path) -> tuple[int, ...]:
        """Returns the numbers of the blocks that have no part yet."""
        return tuple(number for number in range(len(self.blocks)) if self.read_part(parts, number) is None)

    def rank_share(self, numbers: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
        """Returns those of `numbers` that process `rank` of `world_size` encodes: adjacent blocks, so that few
        processes read the same compressed file, with about the same amount of text for each process."""
        ends = [0, *accumulate(_weight(self.blocks[number]) for number in numbers)]
        low, high = (bisect_left(ends, ends[-1] * bound / world_size) for bound in (rank, rank + 1))
        return numbers[low:high]

    def with_bytes(self, corpus: Corpus, numbers: Sequence[int], *, block_bytes: int) -> Iterator[tuple[int, Block]]:
        """Yields number and block for each of `numbers`, in order, with the block's bytes if it carries them."""
        for run in self._runs(numbers):
            if not any(self.has_bytes[number] for number in run):
                yield from ((number, self.blocks[number]) for number in run)
                continue
            remaining = {self.blocks[number].start: number for number in run}
            file_corpus = replace(corpus, sources=(self.blocks[run[0]].file,))
            for block in file_corpus.blocks(block_bytes=block_bytes):
                if (number := remaining.pop(block.start, None)) is not None:
                    yield number, block
                    if not remaining:
                        break

    def _runs(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yields `numbers` split where another file begins, which may be the same file again."""
        run: list[int] = []
        for number in numbers:
            block, before = self.blocks[number], self.blocks[run[-1]] if run else None
            if before is not None and (block.file != before.file or block.start <= before.start):
                yield run
                run = []
            run.append(number)
        if run:
            yield run


def _weight(block: Block) -> int:
    """Returns roughly how much text the block holds, in bytes; for parquet, whose blocks count rows, its bytes on
    disk."""
    return max(1, block.disk_bytes, block.stop - block.start)


def list_blocks(job: PrepareJob) -> BlockList:
    """Returns the list that is stored with the parts. If there is none, reads every file once and writes the list."""
    file, sources = job.task.parts / BLOCKS, job.task.corpus.sources
    with suppress(FileNotFoundError, UserError):  # not there or damaged
        return read_block_list(job)
    numbers = {str(source): number for number, source in enumerate(sources)}
    blocks = job.blocks()
    rows = [
        (numbers[str(b.file)], b.start, b.stop, b.line, b.disk_bytes, b.column, b.columns, b.data is not None)
        for b in blocks
    ]
    with write_atomically(file) as stream:
        stream.write(dump_hashed_json({"extent": blocks.extent, "blocks": rows}))
    return read_block_list(job)


def read_block_list(job: PrepareJob) -> BlockList:
    """Reads the list that is stored with the parts. Raises UserError if it is damaged."""
    sources = job.task.corpus.sources
    try:
        raw = load_hashed_json((job.task.parts / BLOCKS).read_bytes())
    except ValueError as error:
        raise UserError(f"{job.task.parts / BLOCKS}: {error}; run the same command again") from None
    blocks = tuple(
        Block(sources[file], start, stop, line, disk_bytes, None, column, columns)
        for file, start, stop, line, disk_bytes, column, columns, _ in raw["blocks"]
    )
    return BlockList(blocks, tuple(row[-1] for row in raw["blocks"]), raw["extent"])
