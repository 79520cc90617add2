"""Reads several corpora as one, each with its own field, separation of documents and cleaning."""

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
    """Returns one corpus with the documents of all `corpora`, in order. A file may be in more than one of them."""
    assert corpora, "nothing to join"
    if len(corpora) == 1:
        return corpora[0]
    return _JoinedCorpus((), members=tuple(corpora), max_rejects=max(member.max_rejects for member in corpora))


@dataclass(frozen=True)
class _JoinedCorpus(Corpus):
    """A corpus whose blocks name the member that reads them. Its own options are not used."""

    _: KW_ONLY
    members: tuple[Corpus, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(file for member in self.members for file in member.sources))

    @cached_property
    def total_bytes(self) -> int:
        return sum(member.total_bytes for member in self.members)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([member.fingerprint for member in self.members]).encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        numbered = enumerate(self.members, start=1)
        return {
            f"{name} of corpus {number}": value for number, member in numbered for name, value in member.facts.items()
        }

    def blocks(self, *, block_bytes: int | None = None) -> Iterator[Block]:
        for number, member in enumerate(self.members):
            for block in member.blocks(block_bytes=block_bytes):
                yield replace(block, corpus=number)

    def read(self, block: Block) -> Iterator[Document | Reject]:
        return self.members[block.corpus].read(block)
