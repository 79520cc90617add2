"""Encoders that are faster than `tokenizers` for a kind of its models, where their ids are the same."""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from terakoya.errors import UserError

_ROWS, _LENGTH = 2000, 20
_CHECKED = 1000
"""The characters of each batch that both encode."""
_ODD = (
    "寺子屋で、読み書き算盤を習う。「そうです」と答えた……。ｶﾞｷﾞ ①㌔ か\u3099 각 \u1100\u1161 é e\u0301 ﬁ",
    "They've said it's 'all'; I'LL say we'd 3,141 or 12345678 times. http://a.com/a_b?c=d#e\tdef f(x):\n  return x\n",
    "  two  spaces \u3000\u00a0 \n\n \r\n\t\t end \x0b\x0c\x85\u2028 ",
    "🙂👩\u200d👧 👍🏽 🇯🇵 ❤\ufe0f \u200b\ufeff \0 \x01\x7f \ufffd \U0010ffff",
    "ーーーーーーーーーーwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww!!!!!!!!!!!!!!!!________________00000000000000000000",
    "Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 简体字 繁體字",
    "",
    " ",
    "\n",
)

logger = logging.getLogger("terakoya")


class FastEncoder(ABC):
    """An encoder in the place of a tokenizer of `tokenizers`. `find_fast_encoder` compares the ids first."""

    name: ClassVar[str]
    without: ClassVar[str]
    """How a user does without it."""

    def __init__(self, backend: Any, *, split: bool) -> None:
        """`split`: whether special tokens in text are ordinary text."""
        self.backend, self.split = backend, split

    @classmethod
    @abstractmethod
    def of(cls, backend: Any, *, split: bool) -> Self | None:
        """Returns the encoder; None where what it needs is not here. Raises ValueError or NotImplementedError where it
        does not read `backend`."""

    @abstractmethod
    def rows(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each line. Raises ValueError where a line cannot be encoded."""

    def encode(self, lines: Sequence[str]) -> list[np.ndarray] | None:
        """Returns the ids of each line; None where a line cannot be encoded, of which `tokenizers` says why.

        Raises UserError if the beginning of a line in the middle has other ids by `tokenizers`.
        """
        try:
            rows = self.rows(lines)
        except ValueError:
            return None
        begin = [lines[len(lines) // 2][:_CHECKED]] if lines else []
        if self.differing(begin) is not None:
            raise UserError(
                f"{self.name} and tokenizers give other ids for the text {begin[0]!r}; {self.without}, and prepare "
                "again from the beginning"
            )
        return rows

    def differing(self, texts: Sequence[str]) -> str | None:
        """Returns the first of `texts` with other ids by `tokenizers`, None if there is none."""
        self.backend.encode_special_tokens = self.split
        others = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = self.rows(texts)
        return next((t for t, row, other in zip(texts, rows, others, strict=True) if row.tolist() != other.ids), None)


def find_fast_encoder(backend: Any, *, split: bool) -> FastEncoder | None:
    """Returns an encoder for `backend`, a tokenizer of `tokenizers`; None where no faster one reads it, or where that
    has other ids for one of some thousand texts, which it says."""
    from terakoya.toolkit.tokenizers.fast_bpe import FastBpe
    from terakoya.toolkit.tokenizers.fast_unigram import FastUnigram

    kinds: dict[str, type[FastEncoder]] = {"BPE": FastBpe, "Unigram": FastUnigram}
    kind = kinds.get(type(backend.model).__name__)
    try:
        encoder = None if kind is None else kind.of(backend, split=split)
        if encoder is None or (differing := encoder.differing(sample_texts(backend))) is None:
            return encoder
    except (NotImplementedError, ValueError) as error:
        logger.debug("the tokenizer has no faster encoder: %s", error)
        return None
    logger.info("%s is left out, because it has other ids for the text %r", encoder.name, differing)
    return None


def sample_texts(backend: Any) -> list[str]:
    """Returns texts of all kinds of characters, and of random pieces and added tokens of `backend`."""
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    generator = random.Random(0)
    ids = [*range(backend.get_vocab_size(with_added_tokens=False))]
    rows: list[list[int]] = []
    while ids and len(rows) < _ROWS:  # every piece is in some text
        generator.shuffle(ids)
        rows += [ids[start : start + _LENGTH] for start in range(0, len(ids), _LENGTH)]
    texts = [*_ODD, *backend.decode_batch(rows, skip_special_tokens=False)]
    return [*texts, *(text[:9] + token + text[9:] for token, text in zip(added, texts, strict=False))]
