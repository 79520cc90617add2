"""Puts each sentence on its own line: splits at Japanese stops outside brackets, at Western ones before a capital."""

from __future__ import annotations

import re

_OPEN, _CLOSE = "「『（(【［[〈《", "」』）)】］]〉》"
_MARK = re.compile(rf"[{re.escape(_OPEN + _CLOSE)}]|[。！？!?]+|\.(?=[\"')]*\s)")
_TRAILING = re.compile(r"[」』）)】］\]〉》\"'”’]*")
_CAPITAL_FOLLOWS = re.compile(r"\s+[A-Z\"'(]")


def split_sentences(text: str) -> str:
    """Returns `text` with each sentence on its own line; keeps empty lines, removes white space around sentences.

    A stop inside brackets does not end a sentence (「はい。そうです。」と答えた。), unless the brackets in its line
    do not match.
    """
    return "\n".join("\n".join(_sentences(line)) for line in text.split("\n"))


def _sentences(line: str) -> list[str]:
    matched = _brackets_match(line)
    sentences, start, depth = [], 0, 0
    for mark in _MARK.finditer(line):
        character = mark[0][0]
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif not (matched and depth):
            end = mark.end()
            if character in ".!?" or not matched:
                end = _skip_closing(line, end)
            if character in ".!?" and not _CAPITAL_FOLLOWS.match(line, end):
                continue
            sentences.append(line[start:end].strip())
            start = end
    sentences.append(line[start:].strip())
    return [sentence for sentence in sentences if sentence] or [""]


def _skip_closing(line: str, position: int) -> int:
    match = _TRAILING.match(line, position)
    assert match is not None, "the pattern also matches the empty string"
    return match.end()


def _brackets_match(line: str) -> bool:
    expected: list[str] = []
    for mark in _MARK.finditer(line):
        character = mark[0][0]
        if character in _OPEN:
            expected.append(_CLOSE[_OPEN.index(character)])
        elif character in _CLOSE and (not expected or expected.pop() != character):
            return False
    return not expected
