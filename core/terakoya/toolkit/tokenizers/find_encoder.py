"""Finds the encoder that is faster than `tokenizers` for a kind of its models, where the ids are the same."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terakoya.toolkit.tokenizers.fast_bpe import FastBpe
from terakoya.toolkit.tokenizers.fast_encoder import FastEncoder
from terakoya.toolkit.tokenizers.fast_unigram import FastUnigram
from terakoya.toolkit.tokenizers.merges import NativeBpe

_ROWS, _LENGTH = 2000, 20
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

KINDS: dict[str, Sequence[type[FastEncoder]]] = {"BPE": (NativeBpe, FastBpe), "Unigram": (FastUnigram,)}
"""Class of a model of `tokenizers` -> what may encode in its place, the fastest first."""

logger = logging.getLogger("terakoya")


def find_fast_encoder(backend: Any, *, split: bool) -> FastEncoder | None:
    """Returns an encoder for `backend`, a tokenizer of `tokenizers`; None where no faster one reads it, or where that
    has other ids for one of some thousand texts, which it says."""
    for kind in KINDS.get(type(backend.model).__name__, ()):
        try:
            encoder = kind.of(backend, split=split)
            if encoder is not None and has_equal_ids(encoder, sample_texts(backend)):
                return encoder
        except (NotImplementedError, ValueError) as error:
            logger.debug("%s does not read the tokenizer: %s", kind.name, error)
    return None


def has_equal_ids(encoder: FastEncoder, texts: Sequence[str]) -> bool:
    """Returns whether `texts` have the library's ids by `encoder`; says of one that has not."""
    differing = encoder.differing(texts)
    if differing is not None:
        logger.info("%s is left out, because it has other ids for the text %r", encoder.name, differing)
    return differing is None


def sample_texts(backend: Any) -> list[str]:
    """Returns texts of all kinds of characters, and of random pieces and added tokens of `backend`."""
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    decode = functools.partial(backend.decode_batch, skip_special_tokens=False)
    texts = odd_texts(backend.get_vocab_size(with_added_tokens=False), decode)
    return [*texts, *(text[:9] + token + text[9:] for token, text in zip(added, texts, strict=False))]


def odd_texts(pieces: int, decode: Callable[[list[list[int]]], list[str]]) -> list[str]:
    """Returns texts of all kinds of characters, and what `decode` makes of random ids of `pieces`."""
    generator = np.random.default_rng(0)
    rows: list[list[int]] = []
    while pieces and len(rows) < _ROWS:  # every piece is in some text
        ids = generator.permutation(pieces).tolist()
        rows += [ids[start : start + _LENGTH] for start in range(0, pieces, _LENGTH)]
    return [*_ODD, *decode(rows)]
