"""The step `boilerplate`: C4's rules against the text around a page's text, and their likes in Japanese.

Raffel et al. 2020, Exploring the Limits of Transfer Learning, section 2.2 (https://jmlr.org/papers/v21/20-074.html);
the phrases of English lines are those of C4's code in TensorFlow Datasets.
"""

from __future__ import annotations

import re

from pydantic import Field

from terakoya.components import CleaningStep
from terakoya_filters.words import JAPANESE, SENTENCE, SENTENCE_ENDS, find_words, lines_of

_ENGLISH_LINES = (
    # C4's
    "javascript",
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
    # ours
    "all rights reserved",
    "accept all",
    "skip to content",
)
_JAPANESE_LINES = (
    "javascriptを有効",
    "javascriptが無効",
    "javascriptをオン",
    "all rights reserved",
    "クッキーを使用",
    "クッキーの使用",
    "クッキーを利用",
    "cookieを使用",
    "cookieの使用",
    "cookieを利用",
    "cookie設定",
    "cookieに同意",
    "すべて受け入れる",
    "すべて許可",
    "プライバシーポリシー",
    "個人情報保護方針",
    "個人情報の取り扱い",
    "特定商取引法",
    "利用規約",
    "サイトマップ",
    "無断転載",
    "無断複写",
    "ページの先頭へ",
    "ページトップへ",
    "トップへ戻る",
    "本文へスキップ",
    "続きを読む",
    "もっと見る",
    "お使いのブラウザ",
    "ログインしてください",
    "新規会員登録",
    "カートに入れる",
    "シェアする",
    "ツイートする",
    "メルマガ登録",
)
_ONLY_ENGLISH = set(_ENGLISH_LINES) - set(_JAPANESE_LINES)
_JAPANESE = re.compile(f"[{JAPANESE}]")
_CITATIONS = re.compile(
    rf"(?<=[.,!?。、．，！？」』）\"{JAPANESE}])(?:\[\d+\]|\[edit\]|\[citation needed\]|\[編集\]|\[要出典\]|［要出典］)"
)
_CODE = re.compile(r"[{};]\s*$|^\s*(?://|/\*|#include\b|</?\w+[^>]*>\s*$)")


class Boilerplate(CleaningStep):
    """Removes lines that sites put around a text, and drops documents without a sentence and of code (C4's rules)."""

    remove_lines: bool = True
    """Whether lines with a usual phrase about cookies, terms, JavaScript, navigation and the like are removed."""
    phrases: tuple[str, ...] = ()
    """Further phrases, whose lines are removed too, whatever their case."""
    max_line_characters: int | None = Field(default=80, ge=1)
    """The longest line that is removed for a phrase; null is no limit, as in C4. Unit: characters."""
    remove_citations: bool = True
    """Whether marks such as [1], [citation needed] and [要出典] behind words are removed (C4)."""
    only_sentences: bool = False
    """Whether lines that do not end as a sentence does are removed (C4): headings, lists and verse, too."""
    min_line_words: int = Field(default=0, ge=0)
    """The fewest words of a line that stays (C4: 5, its code: 3)."""
    min_sentences: int = Field(default=1, ge=0)
    """The fewest sentences of a document that stays (C4: 3, its code: 5)."""
    max_code_lines: float = Field(default=0.5, ge=0, le=1)
    """The largest share of lines, from 0 to 1, that end with a curly bracket or semicolon, or are a comment or tag."""
    keep_curly_brackets: bool = True
    """Whether documents with a curly bracket stay (C4: no)."""
    keep_lorem_ipsum: bool = False
    """Whether documents with the words "lorem ipsum" stay (C4: no)."""

    def change(self, text: str) -> str:
        if self.remove_citations and ("[" in text or "［" in text):
            text = _CITATIONS.sub("", text)
        lowered = text.lower()
        phrases = [phrase for phrase in self._phrases if phrase in lowered]
        if not phrases and not self.only_sentences and not self.min_line_words:
            return text
        return "\n".join(line for line in text.split("\n") if self._keeps_line(line.strip(), phrases))

    def _keeps_line(self, line: str, phrases: list[str]) -> bool:
        if not line:
            return True
        if self.only_sentences and (not line.endswith(SENTENCE_ENDS) or line.endswith("...")):
            return False
        if self.min_line_words and len(find_words(line).starts) < self.min_line_words:
            return False
        if self.max_line_characters is not None and len(line) > self.max_line_characters:
            return True
        lowered = line.lower()
        found = [phrase for phrase in phrases if phrase in lowered]
        if found and _JAPANESE.search(line):  # a Japanese sentence about JavaScript is no notice
            found = [phrase for phrase in found if phrase not in _ONLY_ENGLISH]
        return not found

    @property
    def _phrases(self) -> list[str]:
        return [*_ENGLISH_LINES, *_JAPANESE_LINES, *map(str.lower, self.phrases)] if self.remove_lines else []

    def keeps(self, text: str) -> bool:
        return not self.why(text)

    def why(self, text: str) -> str:
        if not self.keep_lorem_ipsum and "lorem ipsum" in text.lower():
            return "lorem ipsum"
        if not self.keep_curly_brackets and "{" in text:
            return "curly bracket"
        lines = lines_of(text)
        if sum(_CODE.search(line) is not None for line in lines) > self.max_code_lines * len(lines):
            return "code"
        sentences = 0
        for _ in SENTENCE.finditer(text) if self.min_sentences else ():
            sentences += 1
            if sentences == self.min_sentences:
                break
        return "few sentences" if sentences < self.min_sentences else ""
