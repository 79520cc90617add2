"""Kinds of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np

from terakoya.components import pattern_probe
from terakoya.components.base import Component
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from terakoya.corpus.corpus import Corpus

Encoded = TypeVar("Encoded")

RECORD = "terakoya.json"
"""The file of a trained tokenizer's folder that names its kind, as "type", and its "settings"."""

SHOWN_CHARACTERS = 60
"""The characters of a text that an error shows."""


def encode_texts(encode: Callable[[list[str]], Encoded], texts: Sequence[str]) -> Encoded:
    """Returns `encode(texts)`, where `encode` calls a tokenizer of Transformers. Raises UserError if its library, which
    is written in Rust, cannot encode one of `texts`; the message shows the first of them. What it raises when it panics
    is no `Exception`, and other errors of it are of no class of their own."""
    try:
        return encode(list(texts))
    except BaseException as error:
        if not _is_of_the_library(error):
            raise
        bad, reason = (texts[0] if texts else ""), error
    for text in texts if len(texts) > 1 else ():
        try:
            encode([text])
        except BaseException as error:
            if not _is_of_the_library(error):
                raise
            bad, reason = text, error
            break
    begin = bad[:SHOWN_CHARACTERS] + "..." * (len(bad) > SHOWN_CHARACTERS)
    raise UserError(
        f"the tokenizer cannot encode the text {json.dumps(begin, ensure_ascii=False)}: "
        f"{' '.join(str(reason).split())[:300]}; leave the text out, or use another tokenizer"
    ) from None


def _is_of_the_library(error: BaseException) -> bool:
    """Whether `error` is a panic, or an error of tokenizers, of the classes that it gives them."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def mecab_arguments(folder: Path) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` without which Transformers looks for the user dictionaries of MeCab
    that lie in `folder` in the working directory; none where there are no such."""
    from terakoya_tokenizer.mecab import place_user_dictionaries

    file = folder / "tokenizer_config.json"
    try:
        written = json.loads(file.read_text(encoding="utf-8")).get("mecab_kwargs") if file.is_file() else None
        placed = place_user_dictionaries(written, folder)
    except (ValueError, AttributeError):
        return {}  # Transformers says what is wrong with it
    return {} if placed is written else {"mecab_kwargs": placed}


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedTokenizerBase:
    """Returns the tokenizer in `folder`, loaded by `AutoTokenizer` from local files, with further `options` of
    `from_pretrained`. `trust_remote_code`: whether Python code that the folder contains may run. Raises UserError if it
    cannot be loaded, whatever a broken file makes Transformers and tokenizers raise, or one of its regular expressions
    takes too long. What tokenizers' Rust code raises when it panics is no `Exception`."""
    from transformers import AutoTokenizer

    pattern_probe.check(Path(folder))
    try:
        return AutoTokenizer.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            **mecab_arguments(Path(folder)),
            **options,
        )
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{folder}: expected a tokenizer that Transformers loads; it says: {reason}") from error


def try_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Returns what `load_tokenizer` does; None if the tokenizer cannot be loaded."""
    try:
        return load_tokenizer(folder, trust_remote_code=trust_remote_code)
    except UserError:
        return None


@dataclass(frozen=True)
class EncodedDocuments:
    """Documents, converted to token ids.

    Attributes:
        ids: the tokens of all lines, (T,) in the vocabulary's dtype. No special tokens are added.
        line_lengths: the number of tokens of each line, (L,) int32. Lines without tokens are left out.
        document_lines: the number of these lines in each document, (D,) int32, including zeros.
        word_starts: (T,) bool, True where a word starts; None where the tokenizer does not know words.
        literals: special token -> how often it occurred literally in the text, for example {"[MASK]": 2}.
        spans: (T, 2) int64, the position of each token's first character in the text of its document, and the position
            after its last one; None unless asked for. Several tokens may be of one character. A character that the
            tokenizer leaves out, such as white space, belongs to no token or to a neighbour.
        unread: the number of a document -> the parts of its text that the tokenizer does not read, such as the rest of
            a line after a NUL. They do not count as its text.
        notes: other counts, by name, of which the store keeps the sums.
        learned: (T,) bool, True for tokens that a model learns to write; None where it learns all.
        rejected: the number of a document without tokens -> why it is rejected; "no tokens" if it is not there.
    """

    ids: np.ndarray
    line_lengths: np.ndarray
    document_lines: np.ndarray
    word_starts: np.ndarray | None
    literals: Mapping[str, int] = field(default_factory=dict)
    spans: np.ndarray | None = None
    unread: Mapping[int, Sequence[str]] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)
    learned: np.ndarray | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)

    @property
    def flags(self) -> dict[str, np.ndarray | None]:
        """The flags of tokens, by the names of their files in a store."""
        return {"words": self.word_starts, "answers": self.learned}


class Encoder(Protocol):
    """The fast path from text to ids. An encoder has caches and belongs to one process.

    An encoder that has `gives_spans = True` also takes `encode(documents, spans=True)`, which adds
    `EncodedDocuments.spans`; `terakoya prepare --words` needs them.
    """

    vocabulary: Vocabulary

    def encode(self, documents: Sequence[str]) -> EncodedDocuments:
        """Returns the ids of `documents`, each split at newlines; equal, line by line, to
        `tokenizer.load(folder)(line, add_special_tokens=False)`."""


class Tokenizer(Component):
    """A kind of tokenizer. It trains a tokenizer into a folder, loads it with Transformers, and encodes with it
    fast."""

    special_tokens_in_text: Literal["parse", "split", "reject"] = "parse"
    """The result of a literal special token in the text. `parse`: its id, as in Transformers. `split`: ordinary tokens,
    as for plain text. `reject`: the document is rejected."""

    fallback: ClassVar[bool] = False
    """Whether `from_folder` of this kind is called only if no other kind can read a folder."""

    keeps_line_ends: ClassVar[bool] = False
    """Whether tokens may contain line ends. A store of documents is then encoded document by document, with
    `encoder.encode(documents, whole=True)`: each document is one line, equal to `tokenizer.load(folder)(document)`."""

    def train(
        self, corpus: Corpus, folder: Path, *, processes: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> Mapping[str, Any]:
        """Trains on `corpus` and saves into `folder` a tokenizer that `AutoTokenizer.from_pretrained` loads offline.

        `progress(done_bytes, total_bytes)` is called repeatedly. Returns facts for the record (number of words, ...).
        """
        raise NotImplementedError

    def planned_vocabulary(self) -> Vocabulary | None:
        """Returns a vocabulary with the size and the special tokens, though not the ids, of the tokenizer that `train`
        makes at most; None where only training can tell. `terakoya run` builds the model for it before its first
        stage."""
        return None

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Returns the settings that read the tokenizer in `folder` with exactly its ids, or None if this kind
        cannot."""
        raise NotImplementedError

    def load(self, folder: Path) -> PreTrainedTokenizerBase:
        """Returns the folder's tokenizer, loaded by Transformers."""
        return load_tokenizer(folder)

    def encoder(self, folder: Path) -> Encoder:
        """Returns a new fast encoder for the tokenizer in `folder`."""
        raise NotImplementedError

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        """Returns hashes of everything, other than the settings, on which ids depend: vocabulary, dictionary, library
        versions."""
        raise NotImplementedError
