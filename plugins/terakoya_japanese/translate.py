"""Finds the translation of a text that the program is about to show: see docs/design/languages.md."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from terakoya_japanese.catalogue import PLACEHOLDER, Entry, read_catalogue

SYSTEM_ERRORS = {
    errno.ENOENT: "そのようなファイルやフォルダはありません",
    errno.EEXIST: "すでにあります",
    errno.EACCES: "許可がありません",
    errno.EPERM: "許されていない操作です",
    errno.ENOTDIR: "フォルダではありません",
    errno.EISDIR: "フォルダです",
    errno.ENOSPC: "ディスクに空きがありません",
    errno.EROFS: "読み取り専用のファイルシステムです",
    errno.EIO: "入出力エラー",
    errno.ENAMETOOLONG: "名前が長すぎます",
    errno.ENOLCK: "ロックが使えません",
    errno.EDQUOT: "ディスクの割り当てを使い切りました",
    errno.EADDRINUSE: "使用中のアドレスです",
}
"""What the system calls its errors, in Japanese."""
VALIDATION = (
    Entry("an integer", "整数"),
    Entry("a number", "数"),
    Entry("a string", "文字列"),
    Entry("an object", "オブジェクト"),
    Entry("true or false", "true か false"),
    Entry("greater than {limit}", "{limit} より大きい値"),
    Entry("greater than or equal to {limit}", "{limit} 以上の値"),
    Entry("less than {limit}", "{limit} より小さい値"),
    Entry("less than or equal to {limit}", "{limit} 以下の値"),
)
"""What pydantic calls values that are expected."""
_TAIL = r"((?:; |, |\. | \(|: | and | of \d|  |\n)(?s:.*)|)"
_NAMES = re.compile(r"\S+(?: \d\S*)?(?: (?:and|or) \S+(?: \d\S*)?)+")
_QUOTED_CHOICE = re.compile(r'(?:"[^"]*", )*"[^"]*" or "[^"]*"')
_COUNT = re.compile(r"([\d,]+) (\S+ .+)")
_QUOTED = re.compile(r'"[^"]*"')
_DURATION = re.compile(r"\d[\d,.]* (?:s|min|h|d)(?: \d+ (?:min|h))?")
_UNITS = {"s": "秒", "min": "分", "h": "時間", "d": "日"}
_JAPANESE = re.compile("[ぁ-んァ-ヶー一-龠々]")
LONG = 8
"""Letters that tell a text with placeholders from others."""
LONGEST = 20_000
"""Characters above which a text is left as it is: no message is so long."""


@cache
def translator() -> Translator:
    """Returns the translator of the catalogue, read once a process."""
    return Translator(read_catalogue(Path(__file__).with_name("ja.po")))


@dataclass(frozen=True)
class Pattern:
    """A text with placeholders.

    Attributes:
        entry: the text and its translation.
        literals: what stands between the placeholders, at least two strings.
    """

    entry: Entry
    literals: tuple[str, ...]

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The regular expression with a group for each placeholder. One that stands directly behind another is what may
        follow a message or not, and begins with a sign. A text of one line fits nothing of several, which are messages
        of their own."""
        groups = [_TAIL if between == "" else "(.*?)" for between in self.literals[:-1]]
        groups[0] = "(.*?)"
        parts = [group + re.escape(literal) for group, literal in zip(groups, self.literals[1:], strict=True)]
        several = any("\n" in literal for literal in self.literals)
        return re.compile(re.escape(self.literals[0]) + "".join(parts), re.DOTALL if several else 0)

    @cached_property
    def endings(self) -> frozenset[str]:
        """The placeholders that stand directly behind a letter: the endings of English plurals, which go."""
        names = PLACEHOLDER.findall(self.entry.source)
        return frozenset(name for name, before in zip(names, self.literals, strict=False) if before[-1:].isalpha())

    @cached_property
    def is_long(self) -> bool:
        """Whether the words between the placeholders are enough to tell the text from all others."""
        start = self.literals[0]
        begins = len(start) > 5 and (start.endswith(": ") or start.count(" ") > 1)
        return begins or len(re.findall("[a-z]", "".join(self.literals))) >= LONG

    def groups(self, text: str) -> dict[str, str] | None:
        """Returns placeholder -> what stands in its place in `text`; None where `text` is no such text."""
        if not (text.startswith(self.literals[0]) and text.endswith(self.literals[-1])):
            return None
        place = 0
        for literal in self.literals:  # cheap, and enough for almost all
            place = text.find(literal, place)
            if place < 0:
                return None
            place += len(literal)
        found = self.expression.fullmatch(text)
        return None if found is None else dict(zip(PLACEHOLDER.findall(self.entry.source), found.groups(), strict=True))


class Translator:
    """Translates finished texts: values are filled in already, so an entry with placeholders is a pattern. The pattern
    with the most words that fits a text is taken; what fills its placeholders is translated in turn. Where no entry is
    a whole text, its lines, its end after a place (`FILE: KEY: ...`), its clauses and its sentences are tried."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._exact = {os.strerror(number): text for number, text in SYSTEM_ERRORS.items()}
        patterns: list[Pattern] = []
        for entry in (part for each in (*VALIDATION, *entries) if each.translation for part in _with_end(each)):
            literals = tuple(PLACEHOLDER.split(entry.source)[::2])
            if len(literals) == 1:
                self._exact[entry.source] = entry.translation
                if entry.source.isidentifier():  # a name, which tables and lists show with spaces
                    self._exact.setdefault(entry.source.replace("_", " "), entry.translation)
            else:
                patterns.append(Pattern(entry, literals))
        self._patterns = sorted(patterns, key=lambda pattern: -sum(map(len, pattern.literals)))

    def __call__(self, text: str) -> str:
        """Returns `text` in the other language, as far as the catalogue knows it."""
        if len(text) > LONGEST or not text.strip() or text.lstrip().startswith(('{"', "[{", "{\n")):
            return text
        whole = self._whole(text)
        return "".join(self._pieces(text)) if whole is None else whole

    def _whole(self, text: str) -> str | None:
        if text in self._exact:
            return self._exact[text]
        if _DURATION.fullmatch(text):
            return re.sub("[a-z]+", lambda unit: _UNITS[unit[0]], text)
        places = self._places(text)
        for pattern in self._patterns:
            for start in places if pattern.literals[0] and pattern.is_long else (0,):
                groups = pattern.groups(text[start:])
                if groups is not None and (pattern.is_long or all(map(self._is_value, groups.values()))):
                    values = {
                        name: "" if name in pattern.endings and each in ("", "s", "es") else self._value(each)
                        for name, each in groups.items()
                    }
                    return text[:start] + _fill_in(pattern.entry.translation, values)
        return None

    def _places(self, text: str) -> list[int]:
        """Returns 0 and where the message begins behind each part of its place (`FILE: KEY: `, `launch NAME: `)."""
        starts = [0]
        for part in text.split("\n", 1)[0].split(": ")[:-1]:
            if " " in part.removeprefix("launch ") or (len(starts) == 1 and part in self._exact):
                break
            starts.append(starts[-1] + len(part) + 2)
        return starts

    def _is_value(self, text: str) -> bool:
        """Returns whether `text` may stand for a placeholder of a short text, which would else match half of English:
        one word, or a text that has a translation."""
        return " " not in text.strip() or self._whole(text) is not None

    def _value(self, text: str) -> str:
        """Returns a value in the other language if it is several words: one may be a name. What is quoted stays."""
        if _QUOTED.fullmatch(text):
            return text
        if _QUOTED_CHOICE.fullmatch(text):
            return text.replace('", "', '"、"').replace('" or "', '" か "')
        if _NAMES.fullmatch(text):
            return text.replace(" or ", " か ").replace(" and ", " と ")
        counts = [_COUNT.fullmatch(part) for part in text.split(", ")]  # "2 bad JSON, 1 bad CSV"
        if all(each is not None and each[2] in self._exact for each in counts):
            return "、".join(f"{self._exact[each[2]]} {each[1]}" for each in counts if each is not None)
        parts = [self._whole(part) for part in text.split("; ")]  # of a list, each item alone
        if len(parts) > 1 and None not in parts:
            return "。".join(filter(None, parts))
        return self(text) if " " in text.strip() else text

    def _pieces(self, text: str) -> Iterator[str]:
        """Yields the parts of a text that is no entry as a whole."""
        stripped = text.strip()
        if stripped != text:
            start = text.index(stripped)
            yield from (text[:start], self(stripped), text[start + len(stripped) :])
            return
        if "\n" in text:
            yield "\n".join(self(line) for line in text.split("\n"))
            return
        if text.endswith(".") and (sentence := self._whole(text[:-1])) is not None:
            yield sentence.removesuffix("。") + "。"
            return
        for place in re.finditer(": ", text):
            rest = self._whole(text[place.end() :])
            if rest is not None and " " in text[place.end() :]:  # one word may be a name
                yield text[: place.end()] + rest
                return
        for sign in ("; ", r"(?<=[.。]) "):
            parts = re.split(sign, text)
            shown = [self(part) for part in parts] if len(parts) > 1 else parts
            if shown != parts:
                joint = "" if sign != "; " else "; " if shown[0].isascii() else "。"
                yield joint.join(shown)
                return
        yield text


def _with_end(entry: Entry) -> Iterator[Entry]:
    """Yields `entry`, and for what is written behind a place (`: is empty`) also what follows the colon."""
    yield entry
    if entry.source.startswith(": ") and entry.translation.startswith(": "):
        yield Entry(entry.source[2:], entry.translation[2:])


def _fill_in(translation: str, values: Mapping[str, str]) -> str:
    """Returns `translation` with `values` in their places. Between Japanese and other letters is a space, between two
    Japanese ones there is none; what is quoted stays as it is."""
    shown = ""
    parts = PLACEHOLDER.split(translation)
    for part in (values[each] if number % 2 else each for number, each in enumerate(parts)):
        if shown and part:
            if shown[-1] == " " and _JAPANESE.fullmatch(shown[-2:-1]) and _JAPANESE.match(part):
                shown = shown[:-1]
            elif part[0] == " " and _JAPANESE.match(part[1:]) and _JAPANESE.fullmatch(shown[-1]):
                part = part[1:]
            elif part.startswith("; ") and not part.isascii():
                part = f"。{part[2:]}"
            elif shown.count('"') % 2 == 0 and (_needs_space(shown[-1], part[0]) or _needs_space(part[0], shown[-1])):
                part = f" {part}"
        shown += part
    return shown


def _needs_space(one: str, other: str) -> bool:
    return _JAPANESE.fullmatch(one) is not None and other.isascii() and (other.isalnum() or other in '"}')
