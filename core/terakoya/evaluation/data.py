"""What a model is evaluated on: texts of a corpus or a token store, as ids without special tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from terakoya.corpus.corpus import Corpus, Document
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore

Unit = Literal["document", "line"]

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class Text:
    """A document or a line as ids (n,), and how many bytes of UTF-8 it was; None where only ids are kept."""

    ids: np.ndarray
    bytes: int | None


class DataSet(Protocol):
    """A named source of texts."""

    @property
    def name(self) -> str:
        """What it is called in results."""

    def texts(self, unit: Unit, limit: int | None) -> Iterator[Text]:
        """The texts in order, at most `limit` of them."""


@dataclass(frozen=True)
class StoreTexts:
    """The documents of a token store, with the end stored after each; its lines where it is a store of lines, and else
    documents as lines."""

    name: str
    store: TokenStore

    def texts(self, unit: Unit, limit: int | None) -> Iterator[Text]:
        """See `DataSet`."""
        store = self.store
        eos = store.facts.eos
        starts = store.offsets if unit == "line" else store.offsets[store.documents]
        for first, last in islice(pairwise(starts), limit):
            ids = np.asarray(store.tokens[first:last]).astype(np.int64)
            if unit == "line" and eos is not None and len(ids) and ids[-1] == eos:
                ids = ids[:-1]
            yield Text(ids, None)


@dataclass(frozen=True)
class CorpusTexts:
    """The documents of files, or their lines that are not blank, as `encode` turns them into ids."""

    name: str
    corpus: Corpus
    encode: Callable[[str], list[int]]

    def texts(self, unit: Unit, limit: int | None) -> Iterator[Text]:
        """See `DataSet`."""
        documents = (
            item.text
            for block in self.corpus.blocks()
            for item in self.corpus.read(block)
            if isinstance(item, Document)
        )
        texts = documents
        if unit == "line":
            texts = (line for document in documents for line in document.splitlines() if line.strip())
        for text in islice(texts, limit):
            yield Text(np.array(self.encode(text), np.int64), len(text.encode()))


def open_store(folder: Path, *, vocabulary_size: int) -> TokenStore:
    """The store in `folder`. Raises UserError for one that is damaged or has ids which the model has not."""
    store = TokenStore.open(folder)
    if store.facts.vocabulary.size > vocabulary_size:
        raise UserError(
            f"{folder}: was made with a vocabulary of {store.facts.vocabulary.size:,}, the model has "
            f"{vocabulary_size:,} tokens; prepare it with the model's own tokenizer"
        )
    if store.facts.answers:
        logger.warning(
            "%s: holds conversations, of which every token counts here, questions too; a run of objective instruction, "
            "evaluated by its objective, counts answers alone",
            folder,
        )
    return store
