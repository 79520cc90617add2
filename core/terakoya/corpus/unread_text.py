"""The text that MeCab does not read: it stops at a NUL character, in Transformers as here, so that the rest of a line
gets no token. Who encodes or counts a corpus says how much that is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

CHARACTERS, LINES = "characters left out after a NUL", "lines cut at a NUL"
"""Names of the counts of `count_unread`."""

logger = logging.getLogger("terakoya")


def find_unread(text: str, special: re.Pattern[str] | None = None, *, whole: bool = False) -> list[str]:
    """Returns the parts of `text` that are not read: each line from its first NUL on; with `whole`, `text` is one line.

    What `special` matches is read apart from the text around it, which is then cut by itself.
    """
    if "\0" not in text:
        return []
    parts = [text] if whole else text.split("\n")
    if special is not None:
        parts = [segment for part in parts for segment in _split_at(special, part)]
    return [part[part.index("\0") :] for part in parts if "\0" in part]


def _split_at(special: re.Pattern[str], line: str) -> list[str]:
    """Returns the texts between the matches of `special`, whatever groups it has."""
    edges = [0, *(edge for match in special.finditer(line) for edge in match.span()), len(line)]
    return [line[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def count_unread(parts: Iterable[str]) -> dict[str, int]:
    """Returns the counts CHARACTERS and LINES of the `parts` that `find_unread` returns; nothing without any."""
    sizes = [len(part) for part in parts]
    return {CHARACTERS: sum(sizes), LINES: len(sizes)} if sizes else {}


def warn_of_unread(counts: Mapping[str, int]) -> None:
    """Warns if `counts` has CHARACTERS and LINES."""
    if counts.get(LINES):
        logger.warning(
            "%s lines are cut at a NUL character, where MeCab stops: %s characters are left out; remove NUL characters "
            "from the corpus",
            f"{counts[LINES]:,}",
            f"{counts[CHARACTERS]:,}",
        )
