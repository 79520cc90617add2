"""How well the vocabulary of a model fits a text: tokens a character, and what more pieces would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.samples import read_samples
from terakoya.tokenization.recognise import recognise_tokenizer


@dataclass(frozen=True)
class Fit:
    """How a tokenizer divides a sample of text.

    Attributes:
        tokens, characters: of the sample.
        unknown: tokens that stand for text without a piece.
        knows_words: whether the tokenizer says where words start; `gives_spans` whether it says of which characters a
            token is, so that a word finder can.
        vocabulary: the tokenizer's.
    """

    tokens: int
    characters: int
    unknown: int
    knows_words: bool
    gives_spans: bool
    vocabulary: Vocabulary

    @property
    def pieces(self) -> int:
        """The size of the vocabulary."""
        return self.vocabulary.size

    @property
    def rate(self) -> float:
        """Tokens a character."""
        return self.tokens / self.characters

    def saved_by(self, other: Fit) -> float:
        """Returns the share of tokens that the tokenizer of `other` saves on the same sample. An unknown token counts
        twice: what it stands for is lost."""
        return 1 - (other.tokens + other.unknown) / (self.tokens + self.unknown)


def sample_texts(corpus: Corpus) -> Sequence[str]:
    """Returns documents from all over the corpus, altogether a megabyte and the rest of the last of each place."""
    return [document.text for _, documents in read_samples(corpus, 1 << 20) for document in documents]


def measure_fit(tokenizer: Path, texts: Sequence[str]) -> Fit:
    """Returns how the tokenizer in a folder divides `texts`. Raises UserError if none reads the folder."""
    encoder = recognise_tokenizer(tokenizer).encoder(tokenizer)
    encoded = encoder.encode(texts)
    unknown = encoder.vocabulary.unk
    return Fit(
        len(encoded.ids), sum(map(len, texts)), 0 if unknown is None else int((encoded.ids == unknown).sum()),
        encoded.word_starts is not None, bool(getattr(encoder, "gives_spans", False)), encoder.vocabulary,
    )  # fmt: skip
