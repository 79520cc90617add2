"""Record formats: what the objects of jsonl lines are, where they are no texts under one key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from terakoya.components.tokenizer import EncodedDocuments, Tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.documents import RecordReader

if TYPE_CHECKING:
    import numpy as np


class RecordFormat(RecordReader, Protocol):
    """How objects become documents and these become tokens, of which a model learns some; picklable."""

    @property
    def recorded(self) -> Mapping[str, str]:
        """Settings that `store.json` records."""

    @property
    def inputs(self) -> Mapping[str, str]:
        """Hashes of what documents depend on beside the corpus and the tokenizer."""

    @property
    def tokenizer_files(self) -> Mapping[str, str]:
        """Texts of files that the store's copy of the tokenizer gets, by name."""

    def encoder(
        self, tokenizer: Tokenizer, folder: Path, vocabulary: Vocabulary
    ) -> Callable[[Sequence[str]], EncodedDocuments]:
        """Returns a function that encodes documents, with `EncodedDocuments.learned`; it belongs to one process."""

    def tell(self, notes: Mapping[str, int], documents: int) -> None:
        """Warns of what `EncodedDocuments.notes` of all documents add up to."""

    def tell_store(self, folder: Path, learned: float) -> None:
        """Says what a finished store holds: the share `learned` of its tokens."""


class WholeDocuments(Protocol):
    """How a store of documents that stay whole is used: each is in one row, which may have several."""

    @property
    def only_learned(self) -> bool:
        """Whether only the tokens that the store marks are labels."""

    def check(self, store: Any) -> None:
        """Raises UserError where the `TokenStore` does not fit."""

    def plan(self, store: Any, kind: str, sequence_length: int, spans: Callable[..., Any]) -> Any:
        """Returns the `rows.packing.Plan` of the layout `kind`. spans: (first, stop) -> where the inputs of the
        documents [first, stop) start in the tokens, and their lengths."""

    def choose_labels(self, learned: np.ndarray, document_ids: np.ndarray) -> np.ndarray:
        """Returns which of the `learned` tokens (B, T) bool of rows are labels, (B, T) bool."""
