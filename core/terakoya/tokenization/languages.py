"""What a vocabulary tells of its language, and whether a tokenizer keeps the marks of that language."""

from __future__ import annotations

import logging
import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from terakoya.errors import UserError
from terakoya.toolkit.initializers.pieces import Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from terakoya.components import Encoder, Tokenizer

KANA = re.compile(r"[\u3041-\u3096\u30a1-\u30fa]")
SHARE = 0.05
"""The share of pieces with kana from which on a vocabulary is taken for Japanese. It is 31 % in Tohoku University's
BERT v3, 22 % in llm-jp's 50k, and 22 to 25 % in vocabularies of 2,400 and 4,000 pieces."""
MARKED = tuple(kana for kana in map(chr, range(0x3041, 0x30FB)) if len(unicodedata.normalize("NFD", kana)) == 2)
"""The kana with dakuten or handakuten, such as が and パ."""

logger = logging.getLogger("terakoya")


def guess_languages(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns ["ja"] for a vocabulary with kana, else nothing: the other languages share their letters."""
    texts = [piece.text.decode(errors="ignore") for piece in Pieces(tokenizer).texts.values()]
    with_kana = sum(1 for text in texts if KANA.search(text))
    return ["ja"] if with_kana > SHARE * len(texts) else []


def warn_of_lost_dakuten(encoder: Encoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Warns if the Japanese `tokenizer` in `folder`, which `encoder` encodes with, reads kana with and without dakuten
    alike: what lower-cases with BERT's basic rules takes dakuten for an accent and removes it."""
    try:
        found = encoder.encode([*MARKED, *(unicodedata.normalize("NFD", kana)[0] for kana in MARKED)])
    except UserError:  # without a token for what is unknown: a vocabulary that lacks kana
        return
    if len(found.line_lengths) != 2 * len(MARKED):
        return
    ids = np.split(found.ids, np.cumsum(found.line_lengths)[:-1])
    pairs = zip(ids[: len(MARKED)], ids[len(MARKED) :], strict=True)
    unknown = encoder.vocabulary.unk
    alike = [marked for marked, plain in pairs if np.array_equal(marked, plain) and unknown not in marked]
    if alike and guess_languages(tokenizer.load(folder)):
        logger.warning(
            "%s: the tokenizer reads パンダ and ハンダ alike: it lower-cases text by rules that take dakuten for an "
            "accent and remove it; for Japanese leave --do-lower-case out, or set do_lower_case to false in its "
            "tokenizer_config.json if the model was trained so",
            folder,
        )
