"""Lines of a text whose characters take one or two columns."""

from __future__ import annotations

import re
from collections.abc import Iterator

_CLOSING = "、。，．・：；？！）」』】〉》ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ"
"""Signs that no line begins with."""
_CLOSING_LATIN = re.compile(r"[)\]},:;!?%]|\.(?![A-Za-z0-9])")
"""The same in Latin text, where `.txt` is a word."""
_OPENING = "（「『【〈《([{"


def wrap(text: str, width: int) -> Iterator[str]:
    """Yields `text` in lines of at most `width` columns: broken at spaces and between Japanese characters, never within
    a word of Latin letters, within a `command` that fits into a line, or before a sign that closes. All lines have the
    indent of the first. A text that fits stays as it is."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        yield text
        return
    indent = text[: len(text) - len(text.lstrip(" "))]
    if indent:
        yield from (indent + line for line in wrap(text[len(indent) :], width - len(indent)))
        return
    words = re.findall(rf" +|(?<!\S)`[ -_a-~]{{1,{max(width - 2, 1)}}}`[!-~]*|[!-~]+|[^ !-~][{_CLOSING}]*", text)
    joined: list[str] = []
    for word in words:  # a closing sign stays with what it closes
        closes = word[0] in _CLOSING or _CLOSING_LATIN.match(word) is not None
        if joined and not joined[-1].isspace() and (closes or joined[-1][-1] in _OPENING):
            joined[-1] += word
        else:
            joined.append(word)
    line = ""
    for word in joined:
        if cell_len(line + word.rstrip()) > width and line.strip():
            yield line.rstrip()
            line = ""
        if line or not word.isspace():
            line += word
    if line.strip():
        yield line.rstrip()
