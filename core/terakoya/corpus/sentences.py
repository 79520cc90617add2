"""Text cut into sentences, one a line: at Japanese full stops outside brackets, at Western ones before a capital."""

from __future__ import annotations

import re

_OPEN, _CLOSE = "「『（(【［[〈《", "」』）)】］]〉》"
_MARK = re.compile(rf"[{re.escape(_OPEN + _CLOSE)}]|[。！？!?]+|\.(?=[\"')]*\s)")
_TRAILING = re.compile(r"[」』）)】］\]〉》\"'”’]*")
_CAPITAL_FOLLOWS = re.compile(r"\s+[A-Z\"'(]")


def split_sentences(text: str) -> str:
    """`text` with each sentence on a line of its own; empty lines are kept, white space around sentences is not.

    A stop inside brackets ends no sentence (「はい。そうです。」と答えた。), unless they do not pair up in that line.
    """
    return "\n".join("\n".join(_sentences(line)) for line in text.split("\n"))


def _sentences(line: str) -> list[str]:
    paired = _pairs_up(line)
    found, start, depth = [], 0, 0
    for mark in _MARK.finditer(line):
        character = mark[0][0]
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif not (paired and depth):
            end = mark.end()
            if character in ".!?" or not paired:
                end = _past_closing(line, end)
            if character in ".!?" and not _CAPITAL_FOLLOWS.match(line, end):
                continue
            found.append(line[start:end].strip())
            start = end
    found.append(line[start:].strip())
    return [sentence for sentence in found if sentence] or [""]


def _past_closing(line: str, at: int) -> int:
    found = _TRAILING.match(line, at)
    assert found is not None, "the pattern matches nothing, too"
    return found.end()


def _pairs_up(line: str) -> bool:
    expected: list[str] = []
    for mark in _MARK.finditer(line):
        character = mark[0][0]
        if character in _OPEN:
            expected.append(_CLOSE[_OPEN.index(character)])
        elif character in _CLOSE and (not expected or expected.pop() != character):
            return False
    return not expected
