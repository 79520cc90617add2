"""The language of a model, as far as its vocabulary tells."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from terakoya.toolkit.initializers.pieces import Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KANA = re.compile(r"[\u3041-\u3096\u30a1-\u30fa]")
SHARE = 0.05
"""The share of pieces with kana from which on a vocabulary is taken for Japanese. It is 31 % in Tohoku University's
BERT v3, 22 % in llm-jp's 50k, and 22 to 25 % in vocabularies of 2,400 and 4,000 pieces."""


def guess_languages(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns ["ja"] for a vocabulary with kana, else nothing: the other languages share their letters."""
    texts = [piece.text.decode(errors="ignore") for piece in Pieces(tokenizer).texts.values()]
    with_kana = sum(1 for text in texts if KANA.search(text))
    return ["ja"] if with_kana > SHARE * len(texts) else []
