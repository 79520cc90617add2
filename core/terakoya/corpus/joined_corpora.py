"""Several corpora read as one, each with its own field, way of separating documents and cleaning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Block, Document, Reject


def join_corpora(corpora: Sequence[Corpus]) -> Corpus:
    """The documents of all of `corpora`, one corpus after the other. A file may be in more than one of them."""
    assert corpora, "nothing to join"
    return corpora[0] if len(corpora) == 1 else _JoinedCorpus((), members=tuple(corpora))


@dataclass(frozen=True)
class _JoinedCorpus(Corpus):
    """A corpus whose blocks say which of its members they are read by. Its own options mean nothing."""

    _: KW_ONLY
    members: tuple[Corpus, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(file for each in self.members for file in each.sources))

    @cached_property
    def total_bytes(self) -> int:
        return sum(each.total_bytes for each in self.members)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([each.fingerprint for each in self.members]).encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        numbered = enumerate(self.members, start=1)
        return {f"{name} of corpus {number}": value for number, each in numbered for name, value in each.facts.items()}

    def blocks(self, *, block_bytes: int | None = None) -> Iterator[Block]:
        for number, each in enumerate(self.members):
            for block in each.blocks(block_bytes=block_bytes):
                yield replace(block, corpus=number)

    def read(self, block: Block) -> Iterator[Document | Reject]:
        return self.members[block.corpus].read(block)
