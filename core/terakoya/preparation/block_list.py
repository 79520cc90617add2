"""The blocks of a preparation as a list on disk, so that processes which never talk agree on every part's number."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import orjson

from terakoya.atomic_files import committed
from terakoya.corpus.corpus import Block, Corpus
from terakoya.preparation.encoding import source_name
from terakoya.preparation.job import PrepareJob
from terakoya.store.parts import PartFacts, read_part

BLOCKS = "blocks.json"
"""The list's name in the folder of parts. It stands for the same input as the parts do."""


@dataclass(frozen=True)
class BlockList:
    """Every block of a job, in order, without the text.

    Attributes:
        extent: where the first begins and the last ends, see `ShardBlocks`.
        has_bytes: for each block whether its bytes travel with it: then its file must be cut once more to get them.
    """

    blocks: tuple[Block, ...]
    has_bytes: tuple[bool, ...]
    extent: str

    def read_part(self, parts: Path, number: int) -> PartFacts | None:
        """The facts of block `number`'s part, None if it is not there."""
        facts = read_part(parts, number)
        return facts if facts is not None and facts.source == source_name(self.blocks[number]) else None

    def missing_parts(self, parts: Path) -> tuple[int, ...]:
        """The numbers of the blocks that have no part yet."""
        return tuple(number for number in range(len(self.blocks)) if self.read_part(parts, number) is None)

    def rank_share(self, numbers: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
        """Those of `numbers` that process `rank` of `world_size` encodes: neighbours, so that a compressed file is read
        by few of them, with about as much text for each."""
        ends = [0, *accumulate(_weight(self.blocks[number]) for number in numbers)]
        low, high = (bisect_left(ends, ends[-1] * each / world_size) for each in (rank, rank + 1))
        return numbers[low:high]

    def with_bytes(self, corpus: Corpus, numbers: Sequence[int], *, block_bytes: int) -> Iterator[tuple[int, Block]]:
        """The blocks `numbers`, in order, with their bytes where those travel with them."""
        for run in self._runs(numbers):
            if not self.has_bytes[run[0]]:
                yield from ((number, self.blocks[number]) for number in run)
                continue
            wanted = {self.blocks[number].start: number for number in run}
            one = replace(corpus, sources=(self.blocks[run[0]].file,))
            for block in one.blocks(block_bytes=block_bytes):
                if (number := wanted.pop(block.start, None)) is not None:
                    yield number, block
                    if not wanted:
                        break

    def _runs(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """`numbers` cut where one file ends and the next begins, which may be the same once more."""
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
    """About how much text it is: bytes, but of parquet, where a block is counted in rows, what it takes on disk."""
    return max(1, block.disk_bytes, block.stop - block.start)


def list_blocks(job: PrepareJob) -> BlockList:
    """The list that lies with the parts, made if there is none: every file is then read once, in one pass."""
    file, sources = job.task.parts / BLOCKS, job.task.corpus.sources
    if file.exists():
        return read_block_list(job)
    numbers = {str(source): number for number, source in enumerate(sources)}
    blocks = job.blocks()
    rows = [
        (numbers[str(b.file)], b.start, b.stop, b.line, b.disk_bytes, b.column, b.columns, b.data is not None)
        for b in blocks
    ]
    with committed(file) as stream:
        stream.write(orjson.dumps({"extent": blocks.extent, "blocks": rows}))
    return read_block_list(job)


def read_block_list(job: PrepareJob) -> BlockList:
    """The list that lies with the parts."""
    sources = job.task.corpus.sources
    raw = orjson.loads((job.task.parts / BLOCKS).read_bytes())
    blocks = tuple(
        Block(sources[file], start, stop, line, disk_bytes, None, column, columns)
        for file, start, stop, line, disk_bytes, column, columns, _ in raw["blocks"]
    )
    return BlockList(blocks, tuple(row[-1] for row in raw["blocks"]), raw["extent"])
