"""Selects the blocks of one shard of a corpus, so that several machines prepare shards without communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from terakoya.corpus.corpus import Block, Corpus
from terakoya.errors import UserError


@dataclass(frozen=True)
class Shard:
    """Shard `number` (from 1) of `count`: the blocks whose middle is in its range of the corpus' bytes on disk, so that
    as many files of nearly one size as there are shards make one shard each."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise UserError(f"--shard: expected a number from 1 to {self.count}, got {self.number}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parses text such as `3/16`. Raises UserError for anything else."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and int(count)):
            raise UserError(f'--shard: expected a number and a count such as 3/16, got "{text}"')
        return cls(int(number), int(count))


class ShardBlocks:
    """The blocks of one shard, in order; files of other shards are not opened.

    After an iteration, `extent` says where the blocks begin and end. The position on disk while a compressed file is
    read may differ between versions of libraries, so `store merge` compares the extents of adjacent shards.
    """

    def __init__(self, corpus: Corpus, shard: Shard, *, block_bytes: int) -> None:
        self._corpus, self._block_bytes = corpus, block_bytes
        self._low = corpus.total_bytes * (shard.number - 1) // shard.count
        self._high = corpus.total_bytes * shard.number // shard.count
        self.extent = ""

    @property
    def disk_bytes(self) -> int:
        """Approximate bytes of the blocks on disk."""
        return self._high - self._low

    def __iter__(self) -> Iterator[Block]:
        begin = end = ""
        next_file = 0
        for file in self._corpus.sources:
            at, next_file = next_file, next_file + file.stat().st_size
            if next_file <= self._low or at >= self._high:
                continue
            name = ""
            for block in replace(self._corpus, sources=(file,)).blocks(block_bytes=self._block_bytes):
                # a reader of a compressed file reads ahead and may reach the end of the file long before its last block
                middle = min(at + (block.disk_bytes - 1) // 2, next_file - 1)
                if middle >= self._high:
                    break
                if middle >= self._low:
                    name = f"{file.name}:"
                    begin = begin or f"{name}{block.start}"
                    end = f"{name}{block.stop}"
                    yield block
                at += block.disk_bytes
            else:
                end = f"{name}end" if name else end
        self.extent = f"{begin} to {end}"
