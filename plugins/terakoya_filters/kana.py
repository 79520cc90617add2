"""The step `kana`: a Japanese text has a usual share of hiragana, katakana and kanji.

Lists of keywords and names have few hiragana: particles and endings are written with them.
"""

from __future__ import annotations

import re

from pydantic import Field

from terakoya.components import CleaningStep
from terakoya_filters.words import HIRAGANA, KANJI, KATAKANA

_KINDS = {
    # old texts write endings and particles in single katakana
    "hiragana": re.compile(f"[{HIRAGANA}]+|(?<![{KATAKANA}])[{KATAKANA}](?![{KATAKANA}])"),
    "katakana": re.compile(f"[{KATAKANA}]{{2,}}"),
    "kanji": re.compile(f"[{KANJI}]+"),
}


class Kana(CleaningStep):
    """Drops documents by the shares of hiragana, katakana and kanji among these three."""

    min_hiragana: float = Field(default=0.05, ge=0, le=1)
    """The smallest share of hiragana with which a document stays, from 0 to 1."""
    max_katakana: float = Field(default=0.8, ge=0, le=1)
    """The largest share of katakana with which a document stays, from 0 to 1."""
    max_kanji: float = Field(default=0.9, ge=0, le=1)
    """The largest share of kanji with which a document stays, from 0 to 1."""
    min_japanese: int = Field(default=20, ge=0)
    """A document with fewer hiragana, katakana and kanji stays. Unit: characters."""

    def keeps(self, text: str) -> bool:
        return not self.why(text)

    def why(self, text: str) -> str:
        counts = {kind: sum(map(len, pattern.findall(text))) for kind, pattern in _KINDS.items()}
        total = sum(counts.values())
        if total < max(self.min_japanese, 1):
            return ""
        if counts["hiragana"] < self.min_hiragana * total:
            return "little hiragana"
        if counts["katakana"] > self.max_katakana * total:
            return "much katakana"
        return "much kanji" if counts["kanji"] > self.max_kanji * total else ""
