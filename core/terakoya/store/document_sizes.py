"""How much text the documents of a store are: what losses are divided by so that tokenizers compare.

`documents.sizes` holds two numbers of 32 bits for each document, little-endian: the characters (Unicode code points) of
its text as it was read, and its bytes in UTF-8, without what the tokenizer does not read, as MeCab what follows a NUL.
Ids do not tell them: a tokenizer drops spaces and normalises. Imported stores and stores of conversations have no such
file.

Letters: D documents, n any number of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

FILE = "documents.sizes"
SIZES = np.dtype("<u4")


class TextPerToken(NamedTuple):
    """How many characters and bytes of text a token stands for, on average."""

    characters: float
    bytes: float


def measure_texts(texts: Iterable[str]) -> np.ndarray:
    """Returns the characters and bytes of each of `texts`, (n, 2)."""
    return np.array([(len(text), len(text.encode())) for text in texts], SIZES).reshape(-1, 2)
