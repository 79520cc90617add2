"""How many tokens a corpus will give and how much disk its store needs, told from a few pieces of the text."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from terakoya.corpus.corpus import Corpus, Document
from terakoya.errors import UserError
from terakoya.preparation.encoding import BlockEncoder
from terakoya.store.token_store import PARTS, Unit

logger = logging.getLogger("terakoya")

_FILES, _BLOCK_BYTES = 8, 4 << 20
"""Files that are looked into, and how much of each is read, from its start."""
_SAMPLES, _SAMPLE_CHARACTERS = 128, 256
"""Pieces that are encoded, of all files together, and the length of one."""
_FIXED_BYTES = 1_000_000
"""What a store needs beside its tokens: the tokenizer, `store.json`, headers."""


@dataclass(frozen=True)
class StoreEstimate:
    """About how many tokens a store will have, and its bytes."""

    tokens: int
    store_bytes: int


def check_disk_space(out: Path, corpus: Corpus, encoder: BlockEncoder, disk_bytes: int, *, unit: Unit) -> None:
    """Says how much disk the store `out` of `disk_bytes` of `corpus` will need, and warns if there is less.

    An estimate may be wrong, and a run that fills the disk keeps what it has done: UserError only where not even half
    of what was estimated is free, and none where nothing could be estimated.
    """
    need = estimate_store(corpus, encoder, disk_bytes, unit=unit)
    free = shutil.disk_usage(out).free
    if need is None:
        logger.info(
            "disk needed: not known, there is no text where the corpus was looked into; free at %s: %s",
            out,
            _format_megabytes(free),
        )
        return
    logger.info(
        "about %s tokens; disk needed: %s for the store and as much again while it is made; free at %s: %s",
        f"{need.tokens:,}",
        _format_megabytes(need.store_bytes),
        out,
        _format_megabytes(free),
    )
    there = sum(f.stat().st_size for f in (out / PARTS).glob("*")) if (out / PARTS).exists() else 0
    if 2 * need.store_bytes - there <= free:
        return
    wanted = _format_megabytes(2 * need.store_bytes - there)
    if need.store_bytes - there > free:
        raise UserError(
            f"{out}: expected about {wanted} of free disk, got {_format_megabytes(free)}; make room or choose an "
            "--out on a larger disk"
        )
    logger.warning(
        "%s: about %s of free disk may be needed, there are %s; should the disk fill up, finished parts are kept",
        out,
        wanted,
        _format_megabytes(free),
    )


def estimate_store(corpus: Corpus, encoder: BlockEncoder, disk_bytes: int, *, unit: Unit) -> StoreEstimate | None:
    """What `disk_bytes` of `corpus` will come to; None where the places that are read hold no text.

    Read are the beginnings of some files, all of whose documents are counted. Of each beginning the same number of
    short pieces is encoded, spread evenly over its characters: one very long document, or long runs of one character,
    count for as much as they take up of the text, no more and no less.
    """
    files = corpus.sources[:: -(-len(corpus.sources) // _FILES)]
    disk = sequences = documents = 0
    tokens = 0.0
    for file in files:
        one = replace(corpus, sources=(file,))
        block = next(one.blocks(block_bytes=_BLOCK_BYTES), None)
        if block is None:
            continue
        disk += block.disk_bytes
        texts = [item.text for item in one.read(block) if isinstance(item, Document)]
        documents += len(texts)
        sequences += len(texts) if unit == "document" else sum(map(_lines, texts))
        text = "\n".join(texts)
        pieces = _samples(text, _SAMPLES // len(files))
        if text:
            tokens += len(text) * len(encoder.sample(pieces).ids) / sum(map(len, pieces))
    if not documents:
        return None
    if encoder.eos is not None:
        tokens += documents
    scale = disk_bytes / max(1, disk)
    token_bytes = encoder.encoder.vocabulary.dtype().itemsize + 1 / 8
    store = scale * (tokens * token_bytes + 12 * sequences + 8 * documents) * 1.05
    return StoreEstimate(int(scale * tokens), int(store) + _FIXED_BYTES)


def _samples(text: str, count: int) -> Sequence[str]:
    """`count` pieces spread evenly over `text`, which is one piece itself if it is not longer than they are."""
    if len(text) <= count * _SAMPLE_CHARACTERS:
        return [text]
    starts = np.linspace(0, len(text) - _SAMPLE_CHARACTERS, count).astype(np.int64).tolist()
    return [text[start : start + _SAMPLE_CHARACTERS] for start in starts]


def _lines(text: str) -> int:
    """About how many lines of `text` are not empty."""
    return text.count("\n") - text.count("\n\n") + 1


def _format_megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
