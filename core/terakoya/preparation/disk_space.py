"""Estimates, from samples of the text, how many tokens a store will have and how much disk space it needs."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from terakoya.corpus.corpus import Corpus
from terakoya.corpus.samples import read_samples
from terakoya.errors import UserError
from terakoya.preparation.encoding import BlockEncoder
from terakoya.store.token_store import PARTS, Unit

logger = logging.getLogger("terakoya")

_SAMPLES, _SAMPLE_CHARACTERS = 128, 256
"""Number of samples that are encoded, and the length of one."""
_FIXED_BYTES = 1_000_000
"""Bytes of a store other than its tokens: the tokenizer, `store.json`, headers."""


@dataclass(frozen=True)
class StoreEstimate:
    """Estimated tokens and bytes of a store."""

    tokens: int
    store_bytes: int


def check_disk_space(out: Path, corpus: Corpus, encoder: BlockEncoder, disk_bytes: int, *, unit: Unit) -> None:
    """Logs how much disk space the store `out` of `disk_bytes` of `corpus` needs, and warns if less is free.

    An estimate may be wrong, and `prepare` keeps finished parts when the disk is full. So this raises UserError only if
    less than half of the estimate is free, and not at all if nothing could be estimated.
    """
    estimated = estimate_store(corpus, encoder, disk_bytes, unit=unit)
    free = shutil.disk_usage(out).free
    if estimated is None:
        logger.info(
            "disk needed: unknown, the samples of the corpus hold no text; free at %s: %s", out, _format_megabytes(free)
        )
        return
    logger.info(
        "about %s tokens; disk needed: %s for the store and as much again while it is made; free at %s: %s",
        f"{estimated.tokens:,}",
        _format_megabytes(estimated.store_bytes),
        out,
        _format_megabytes(free),
    )
    written = sum(f.stat().st_size for f in (out / PARTS).glob("*")) if (out / PARTS).exists() else 0
    if 2 * estimated.store_bytes - written <= free:
        return
    missing = _format_megabytes(2 * estimated.store_bytes - written)
    if estimated.store_bytes - written > free:
        raise UserError(
            f"{out}: expected about {missing} of free disk, got {_format_megabytes(free)}; make room or choose an "
            "--out on a larger disk"
        )
    logger.warning(
        "%s: about %s of free disk may be needed, %s are free; if the disk fills up, finished parts are kept",
        out,
        missing,
        _format_megabytes(free),
    )


def estimate_store(corpus: Corpus, encoder: BlockEncoder, disk_bytes: int, *, unit: Unit) -> StoreEstimate | None:
    """Estimates the store of `disk_bytes` of `corpus`; None if the parts that are read hold no text.

    Reads parts of the corpus and counts their documents. It encodes short samples, evenly spaced over the characters of
    the parts: so a very long document, or a long run of one character, counts in proportion to its length.
    """
    parts = list(read_samples(corpus))
    disk = sum(disk_bytes for disk_bytes, _ in parts)
    texts = [document.text for _, found in parts for document in found]
    if not texts:
        return None
    documents = len(texts)
    # roughly the lines that are not empty
    sequences = documents if unit == "document" else sum(text.count("\n") - text.count("\n\n") + 1 for text in texts)
    text = "\n".join(texts)
    tokens = len(text) * _tokens_per_character(encoder, _samples(text, _SAMPLES))
    if encoder.eos is not None:
        tokens += documents
    scale = disk_bytes / max(1, disk)
    token_bytes = encoder.encoder.vocabulary.dtype().itemsize + 1 / 8
    store = scale * (tokens * token_bytes + 12 * sequences + 8 * documents) * 1.05
    return StoreEstimate(int(scale * tokens), int(store) + _FIXED_BYTES)


def _tokens_per_character(encoder: BlockEncoder, samples: Sequence[str]) -> float:
    """Returns the average of those of `samples` that can be encoded, 0 without one. A sample is cut anywhere, so it may
    be what its document is not; a document that cannot be encoded is named when its block is encoded."""
    try:
        return len(encoder.sample(samples).ids) / sum(map(len, samples))
    except UserError:
        if len(samples) == 1:
            return 0.0
    rates = [rate for sample in samples if (rate := _tokens_per_character(encoder, [sample]))]
    return sum(rates) / len(rates) if rates else 0.0


def _samples(text: str, count: int) -> Sequence[str]:
    """Returns `count` evenly spaced samples of `text`, or the whole `text` if it is not longer than the samples."""
    if len(text) <= count * _SAMPLE_CHARACTERS:
        return [text]
    starts = np.linspace(0, len(text) - _SAMPLE_CHARACTERS, count).astype(np.int64).tolist()
    return [text[start : start + _SAMPLE_CHARACTERS] for start in starts]


def _format_megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
