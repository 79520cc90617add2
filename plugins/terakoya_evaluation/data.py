"""Data sets of an evaluation: texts of a corpus or a token store, as ids without special tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from terakoya.corpus.corpus import Corpus, Document
from terakoya.corpus.rejects import Rejects
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore, Unit
from terakoya.store.token_store import open_store as open_any_store

_TEXTS = 4096
"""Texts whose places are read at a time."""

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class Text:
    """A document or a line as ids (n,), and its characters and bytes in UTF-8; 0 if only the ids are known."""

    ids: np.ndarray
    characters: int = 0
    bytes: int = 0


class DataSet(Protocol):
    """A named source of texts."""

    @property
    def name(self) -> str:
        """Name of the data set in results."""

    def texts(self, unit: Unit, limit: int | None) -> Iterator[Text]:
        """Yields the texts in order, at most `limit` of them."""


@dataclass(frozen=True)
class StoreTexts:
    """Texts of a token store. A document includes the EOS stored after it; a line does not.

    A store of documents has no lines; each document counts as one.
    """

    name: str
    store: TokenStore

    def texts(self, unit: Unit, limit: int | None) -> Iterator[Text]:
        store = self.store
        eos = store.facts.eos
        known = store.facts.sizes and "document" in (unit, store.facts.unit)
        for number, (first, last) in enumerate(islice(self._bounds(unit), limit)):
            ids = store.ids(first, last).astype(np.int64)
            if unit == "line" and eos is not None and len(ids) and ids[-1] == eos:
                ids = ids[:-1]
            yield Text(ids, *(store.sizes[number].tolist() if known else ()))

    def _bounds(self, unit: Unit) -> Iterator[tuple[int, int]]:
        """Yields where each text starts and ends in the tokens."""
        store = self.store
        count = store.facts.sequences if unit == "line" else store.facts.documents
        for first in range(0, count, _TEXTS):
            numbers = np.arange(first, min(first + _TEXTS, count) + 1)
            starts = store.sequence_starts(numbers) if unit == "line" else store.document_starts(numbers)
            yield from pairwise(starts.tolist())


@dataclass(frozen=True)
class CorpusTexts:
    """Documents of files, or their lines that are not blank, encoded by `encode`."""

    name: str
    corpus: Corpus
    encode: Callable[[str], list[int]]

    def texts(self, unit: Unit, limit: int | None) -> Iterator[Text]:
        """Yields the texts, as in `DataSet`, and warns of what was read and is no document."""
        rejects = Rejects()
        texts = ((document, text) for document in self._read(rejects) for text in _split(document.text, unit))
        for document, text in islice(texts, limit):
            try:
                ids = self.encode(text)
            except UserError as error:
                raise UserError(f"{document.file}, line {document.line}: {error}") from error
            yield Text(np.array(ids, np.int64), len(text), len(text.encode()))
        rejects.tell()

    def _read(self, rejects: Rejects) -> Iterator[Document]:
        """Yields the documents, and counts the rejects in `rejects`."""
        for block in self.corpus.blocks():
            for item in self.corpus.read(block):
                rejects.add(item)
                if isinstance(item, Document):
                    yield item


def _split(text: str, unit: Unit) -> list[str]:
    """Returns the lines of `text` that are not blank, or `text` itself."""
    return [line for line in text.split("\n") if line.strip()] if unit == "line" else [text]


def open_store(folder: Path, *, vocabulary_size: int) -> TokenStore:
    """Opens the store in `folder`. Raises UserError if it is damaged or has ids that the model does not have."""
    store = open_any_store(folder)
    if store.facts.vocabulary.size > vocabulary_size:
        raise UserError(
            f"{folder}: was prepared with a vocabulary of {store.facts.vocabulary.size:,}, the model has "
            f"{vocabulary_size:,} tokens; prepare it with the model's own tokenizer"
        )
    if store.facts.answers:
        logger.warning(
            "%s: contains conversations; this measure scores every token, also of questions; --measure objective of an "
            "instruction-tuning run scores only answers",
            folder,
        )
    return store
