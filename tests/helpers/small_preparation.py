"""A preparation of two small files, for processes that tests start."""

from __future__ import annotations

from pathlib import Path

from word_tokenizer import WordTokenizer

from terakoya.corpus.corpus import Corpus
from terakoya.preparation.job import Preparation
from terakoya.preparation.sharding import Shard


def preparation(out: str, *, shard: Shard | None = None) -> Preparation:
    corpus = Corpus([Path("a.jsonl"), Path("b.jsonl.gz")], block_bytes=6000)
    return Preparation.of(corpus, WordTokenizer(), Path("tokenizer"), Path(out), max_rejects=1.0, shard=shard)
