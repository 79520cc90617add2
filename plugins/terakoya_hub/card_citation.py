"""The section of a card about how to cite a model and the program that trained it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from terakoya.version import __version__

_SPECIAL = re.compile(r"([&%$#_{}])")
"""The signs that BibTeX would read as its own."""


def describe(name: str, *, authors: Sequence[str], seconds: float | None, entry: str | None) -> str:
    """Returns the section with BibTeX of the model and of terakoya.

    Args:
        name: the repository, ORGANISATION/NAME.
        authors: names for the entry of the model; without any the model has none.
        seconds: when the model was finished, in seconds since 1970; None if that is not known.
        entry: an entry of the authors' own, in place of one made from `authors`.
    """
    entries = [entry.strip()] if entry is not None else []
    if entry is None and authors:
        short = name.rpartition("/")[2]
        fields = [("author", " and ".join(map(_escape, authors))), ("title", f"{{{_escape(short)}}}")]
        if seconds is not None:
            fields.append(("year", time.strftime("%Y", time.gmtime(seconds))))
        fields.append(("howpublished", rf"\url{{https://huggingface.co/{name}}}"))
        entries.append(_entry("misc", re.sub(r"[^\w.-]", "", short), fields))
    title = "{terakoya}: training language models from raw text, {Japanese} first"
    software = [("author", "{The terakoya developers}"), ("title", title), ("version", __version__)]
    entries.append(_entry("software", "terakoya", software))
    return "## Citation\n\n```bibtex\n" + "\n\n".join(entries) + "\n```"


def _entry(kind: str, key: str, fields: Sequence[tuple[str, str]]) -> str:
    return "\n".join([f"@{kind}{{{key},", *(f"  {name} = {{{value}}}," for name, value in fields), "}"])


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)
