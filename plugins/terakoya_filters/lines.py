"""The step `lines`: documents and lines have a usual length, and lines are sentences rather than items.

Gopher's quality rules (Rae et al. 2021, appendix A.1.1, https://arxiv.org/abs/2112.11446) and FineWeb's (Penedo et al.
2024, https://arxiv.org/abs/2406.17557), where each setting says whose it is. Words are those of `words.py`.
"""

from __future__ import annotations

from pydantic import Field

from terakoya.components import CleaningStep
from terakoya_filters.words import SENTENCE_ENDS, Words, find_words, lines_of, share_with_letter

_BULLETS = ("•", "-", "*", "・", "■", "◆", "▶")
_ELLIPSES = ("...", "…", "・・・")


class Lines(CleaningStep):
    """Drops documents by their length and the kinds of their lines (Gopher's and FineWeb's rules)."""

    min_characters: int = Field(default=50, ge=0)
    """The shortest document that stays; Gopher: 50 words. Unit: characters."""
    max_characters: int | None = Field(default=None, ge=1)
    """The longest document that stays; Gopher: 100,000 words; null is no limit. Unit: characters."""
    max_word_characters: int | None = Field(default=1000, ge=1)
    """The longest word, such as base64, with which a document stays; null is no limit; C4: for lines. Unit:
    characters."""
    max_mean_word: float | None = Field(default=20.0, gt=0)
    """The largest mean of the words' lengths; Gopher: 10 for English; null is no limit. Unit: characters."""
    max_bullets: float = Field(default=0.9, ge=0, le=1)
    """The largest share of lines that begin with a bullet, from 0 to 1; Gopher's number."""
    max_ellipses: float = Field(default=0.3, ge=0, le=1)
    """The largest share of lines that end with an ellipsis, from 0 to 1; Gopher's number."""
    max_symbols: float = Field(default=0.1, ge=0)
    """The largest number of # for each word, and of ellipses; Gopher's number."""
    min_letters: float = Field(default=0.5, ge=0, le=1)
    """The smallest share of words with a letter, from 0 to 1; Gopher: 0.8 of English words."""
    min_sentences: float = Field(default=0.0, ge=0, le=1)
    """The smallest share of lines that end as a sentence does, from 0 to 1; FineWeb: 0.12."""
    max_short_lines: float = Field(default=1.0, ge=0, le=1)
    """The largest share of lines with at most `short_characters`, from 0 to 1; FineWeb: 0.67 of 30."""
    short_characters: int = Field(default=10, ge=1)
    """The length of a short line. Unit: characters."""
    max_lines_for_words: float = Field(default=0.3, ge=0)
    """The largest number of line breaks for each word; FineWeb's number."""

    def keeps(self, text: str) -> bool:
        return not self.why(text)

    def why(self, text: str) -> str:
        text = text.strip()
        if len(text) < self.min_characters:
            return "short"
        if self.max_characters is not None and len(text) > self.max_characters:
            return "long"
        lines, words = lines_of(text), find_words(text)
        if not len(words.starts):
            return "no words"
        return self._reason_in_words(text, words) or self._reason_in_lines(lines, len(words.starts))

    def _reason_in_words(self, text: str, words: Words) -> str:
        lengths = words.ends - words.starts
        if self.max_word_characters is not None and lengths.max() > self.max_word_characters:
            return "long word"
        if self.max_mean_word is not None and lengths.mean() > self.max_mean_word:
            return "long words"
        for symbol, count in (("#", text.count("#")), ("ellipses", sum(map(text.count, _ELLIPSES)))):
            if count > self.max_symbols * len(lengths):
                return f"many {symbol}"
        return "few letters" if share_with_letter(text, words) < self.min_letters else ""

    def _reason_in_lines(self, lines: list[str], words: int) -> str:
        if sum(line.startswith(_BULLETS) for line in lines) > self.max_bullets * len(lines):
            return "bullets"
        if sum(line.endswith(_ELLIPSES) for line in lines) > self.max_ellipses * len(lines):
            return "ellipses"
        if sum(line.endswith(SENTENCE_ENDS) for line in lines) < self.min_sentences * len(lines):
            return "few sentences"
        if sum(len(line) <= self.short_characters for line in lines) > self.max_short_lines * len(lines):
            return "short lines"
        return "many lines" if len(lines) - 1 > self.max_lines_for_words * words else ""
