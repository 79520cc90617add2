"""BPE by the library fastokens (https://github.com/crusoecloud/fastokens), where its ids are those of `tokenizers`."""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from terakoya.errors import UserError

PACKAGE = "fastokens"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_THREADS = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
_ROWS, _LENGTH = 2000, 20
_CHECKED = 1000
"""The characters of each batch that both libraries encode."""
_ODD = (
    "寺子屋で、読み書き算盤を習う。「そうです」と答えた……。ｶﾞｷﾞ ①㌔ か\u3099 각 \u1100\u1161 é e\u0301 ﬁ",
    "They've said it's 'all'; I'LL say we'd 3,141 or 12345678 times. http://a.com/a_b?c=d#e\tdef f(x):\n  return x\n",
    "  two  spaces \u3000\u00a0 \n\n \r\n\t\t end \x0b\x0c\x85\u2028 ",
    "🙂👩\u200d👧 👍🏽 🇯🇵 ❤\ufe0f \u200b\ufeff \0 \x01\x7f \ufffd \U0010ffff",
    "ーーーーーーーーーーwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww!!!!!!!!!!!!!!!!________________00000000000000000000",
    "Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 简体字 繁體字",
)

logger = logging.getLogger("terakoya")


class FastBpe:
    """A BPE tokenizer of `tokenizers` that fastokens reads."""

    def __init__(self, backend: Any, fast: Any, *, split: bool) -> None:
        """`split`: whether special tokens in text are ordinary text. Take `fast_bpe`, which compares the ids first."""
        self._backend, self._fast, self._split = backend, fast, split

    def encode(self, lines: Sequence[str]) -> list[np.ndarray] | None:
        """Returns the ids of each line; None where a line cannot be encoded, of which `tokenizers` says why.

        Raises UserError if the beginning of a line in the middle has other ids by `tokenizers`.
        """
        try:
            rows = self._rows(lines)
        except ValueError:
            return None
        begin = [lines[len(lines) // 2][:_CHECKED]] if lines else []
        if self.differing(begin) is not None:
            raise UserError(
                f"{PACKAGE} and tokenizers give other ids for the text {begin[0]!r}; pip uninstall {PACKAGE}, and "
                "prepare again from the beginning"
            )
        return rows

    def differing(self, texts: Sequence[str]) -> str | None:
        """Returns the first of `texts` with other ids by `tokenizers`, None if there is none."""
        self._backend.encode_special_tokens = self._split
        others = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = self._rows(texts)
        return next((t for t, row, other in zip(texts, rows, others, strict=True) if row.tolist() != other.ids), None)

    def _rows(self, lines: Sequence[str]) -> list[np.ndarray]:
        ids, ends = self._fast.encode_batch_flat(list(lines), split_special_tokens=self._split)
        flat, stops = np.frombuffer(ids, np.uint32), np.frombuffer(ends, np.uint64).tolist()
        return [flat[start:stop] for start, stop in itertools.pairwise(stops)]


def fast_bpe(backend: Any, *, split: bool) -> FastBpe | None:
    """Returns an encoder for `backend`, a tokenizer of `tokenizers`; None where fastokens is not installed, cannot read
    it, or has other ids for one of some thousand texts, which it says."""
    try:
        import fastokens
    except ImportError:
        return None
    added = backend.get_added_tokens_decoder().values()
    flagged = any(getattr(token, flag) for token in added for flag in _FLAGS)
    if flagged or type(backend.model).__name__ != "BPE":
        return None
    with _one_thread():
        try:
            encoder = FastBpe(backend, fastokens.Tokenizer.from_json_str(backend.to_str()), split=split)
            differing = encoder.differing(sample_texts(backend))
        except ValueError as error:
            logger.debug("%s does not read the tokenizer: %s", PACKAGE, error)
            return None
    if differing is None:
        return encoder
    logger.info("%s is left out, because it has other ids for the text %r", PACKAGE, differing)
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets the library make its threads, which it does when it first encodes, in a world with one processor: every
    process of `prepare` has its own."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
