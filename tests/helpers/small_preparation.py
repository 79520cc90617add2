"""Prepares stores from a corpus and a tokenizer component that no plugin registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from word_tokenizer import WordTokenizer

from terakoya.components import Tokenizer
from terakoya.corpus.corpus import Corpus
from terakoya.preparation.job import PrepareJob
from terakoya.preparation.local import Progress, prepare_locally
from terakoya.preparation.options import PrepareOptions
from terakoya.store.token_store import StoreFacts


def prepare_corpus(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, out: Path, *, progress: Progress | None = None, **options: Any
) -> StoreFacts:
    """Encodes `corpus` with the tokenizer in `folder` into `out`, in one process unless `options` say otherwise."""
    given = PrepareOptions(**{"sources": corpus.sources, "tokenizer": folder, "out": out, "processes": 1, **options})
    return prepare_locally(PrepareJob.create(given, corpus, tokenizer), progress=progress)


def new_job(out: str, *, shard: str | None = None, processes: int = 1, force: bool = False) -> PrepareJob:
    """A job that encodes `a.jsonl` and `b.jsonl.gz` of the working folder, in blocks of 6,000 bytes, into `out`."""
    corpus = Corpus([Path("a.jsonl"), Path("b.jsonl.gz")], block_bytes=6000)
    options = PrepareOptions(
        sources=corpus.sources,
        tokenizer=Path("tokenizer"),
        out=Path(out),
        processes=processes,
        max_rejects=1.0,
        shard=shard,
        force=force,
    )
    return PrepareJob.create(options, corpus, WordTokenizer())


def contents(folder: Path) -> dict[str, bytes]:
    """The content of each file in `folder`, by its path there."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
