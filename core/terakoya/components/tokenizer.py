"""Kinds of tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import numpy as np

from terakoya.components.base import Component
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from terakoya.corpus.corpus import Corpus


@dataclass(frozen=True)
class Encoded:
    """Documents as token ids.

    Attributes:
        ids: every token of every line, (T,) in the vocabulary's dtype. No special tokens are added.
        line_lengths: tokens of each line, (L,) int32. Lines without a token are left out.
        document_lines: lines of each document, (D,) int32, zeros included.
        word_starts: (T,) bool, True where a word starts; None where the tokenizer does not know words.
        literals: how many special tokens stood literally in the text, by token, for example {"[MASK]": 2}.
    """

    ids: np.ndarray
    line_lengths: np.ndarray
    document_lines: np.ndarray
    word_starts: np.ndarray | None
    literals: Mapping[str, int] = field(default_factory=dict)


class Encoder(Protocol):
    """The fast path from text to ids; holds caches, belongs to one process."""

    vocabulary: Vocabulary

    def encode(self, documents: Sequence[str]) -> Encoded:
        """The ids of `documents`, each split at newlines; equal, line by line, to
        `tokenizer.load(folder)(line, add_special_tokens=False)`."""


class Tokenizer(Component):
    """A kind of tokenizer: trains one into a folder, loads it with Transformers, encodes with it at full speed."""

    special_tokens_in_text: Literal["parse", "split", "reject"] = "parse"
    """What a literal special token in the text becomes. `parse`: its id, as Transformers does. `split`: ordinary
    tokens, as if it were plain text. `reject`: the document is quarantined."""

    fallback: ClassVar[bool] = False
    """Whether this kind is asked for a folder only where no other kind reads it."""

    keeps_line_ends: ClassVar[bool] = False
    """Whether tokens may hold line ends. A store of documents is then encoded document by document, with
    `encoder.encode(documents, whole=True)`: each is one line, equal to `tokenizer.load(folder)(document)`."""

    def train(
        self,
        corpus: Corpus,
        folder: Path,
        *,
        processes: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, Any]:
        """Trains on `corpus` and saves into `folder` what `AutoTokenizer.from_pretrained` loads offline.

        `progress(done_bytes, total_bytes)` is called now and then. Returns facts for the record (words seen, ...).
        """
        raise NotImplementedError

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """The settings that read the tokenizer in `folder` with exactly its ids, or None if this kind cannot."""
        raise NotImplementedError

    def load(self, folder: Path) -> PreTrainedTokenizerBase:
        """The folder's tokenizer as Transformers loads it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encoder(self, folder: Path) -> Encoder:
        """A new fast encoder for the tokenizer in `folder`."""
        raise NotImplementedError

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        """What ids depend on beside the settings, each hashed: vocabulary, dictionary, library versions."""
        raise NotImplementedError
