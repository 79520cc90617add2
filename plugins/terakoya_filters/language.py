"""The step `language`: documents of some languages stay.

Scripts tell Japanese, Chinese and Korean apart, without a library. Among languages of other scripts py3langid decides,
whose model lies in its wheel (4.5 MB): langid.py by Lui and Baldwin 2012 (https://aclanthology.org/P12-3005).
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import Field

from terakoya.components import CleaningStep
from terakoya.errors import UserError
from terakoya_filters.words import HIRAGANA, KANJI, KATAKANA

_SCRIPTS = frozenset(("ja", "ko", "zh"))
_KANA = re.compile(f"[{HIRAGANA}{KATAKANA}]")
_HAN = re.compile(f"[{KANJI}]")
_HANGUL = re.compile("[\\u1100-\\u11ff\\u3131-\\u318e\\uac00-\\ud7a3]")
_OTHER_WORDS = re.compile(rf"[^\W\d_{HIRAGANA}{KATAKANA}{KANJI}\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3]+")


class LanguageStep(CleaningStep):
    """Drops documents in other languages than the named ones."""

    languages: tuple[str, ...] = Field(default=("ja",), min_length=1)
    """The languages that stay, by ISO 639-1: "ja", "zh", "ko", and with py3langid many others such as "en"."""
    min_share: float = Field(default=0.2, ge=0, le=1)
    """The smallest share of a text, from 0 to 1, with which Japanese, Chinese or Korean is its language: of the
    characters of its script among these and the words of other scripts, each of which counts as two."""
    min_kana: float = Field(default=0.05, ge=0, le=1)
    """The smallest share of kana among kana and kanji, from 0 to 1, with which these are Japanese; below: Chinese."""
    characters: int = Field(default=2000, ge=1)
    """How much of a text's beginning py3langid reads. Unit: characters."""

    def versions(self) -> Mapping[str, str]:
        if _SCRIPTS.issuperset(self.languages):
            return {}
        try:
            return {"py3langid": importlib.metadata.version("py3langid")}
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f'language: needs py3langid for {", ".join(self.languages)}: pip install "terakoya[filters]"'
            ) from error

    def keeps(self, text: str) -> bool:
        return self._language(text) in self.languages

    def why(self, text: str) -> str:
        return self._language(text) or "no language"

    def _language(self, text: str) -> str:
        kana, han, hangul = (len(pattern.findall(text)) for pattern in (_KANA, _HAN, _HANGUL))
        others = 2 * len(_OTHER_WORDS.findall(text))
        letters = kana + han + hangul + others
        if not letters:
            return ""
        if max(kana + han, hangul) >= self.min_share * letters:
            if hangul > kana + han:
                return "ko"
            return "ja" if kana >= self.min_kana * (kana + han) else "zh"
        if _SCRIPTS.issuperset(self.languages):
            return "another"
        return str(_model().classify(text[: self.characters])[0])


@cache
def _model() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)
