"""Catalogues of translations: gettext's .po files, read as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PLACEHOLDER = re.compile(r"\{([a-z_][a-z_0-9]*)\}")
"""Where a value stands in a text."""


@dataclass(frozen=True)
class Entry:
    """A text of the code and its translation.

    Attributes:
        source: the text, `{name}` where the code fills in a value.
        translation: the same in another language, with the same placeholders in any order.
    """

    source: str
    translation: str


def read_catalogue(file: Path) -> list[Entry]:
    """Returns the entries of a .po file in their order, without its header. Plural forms, contexts and fuzzy entries
    are not used here and not understood."""
    entries: list[Entry] = []
    texts: dict[str, str] = {}
    keyword = ""

    def finish() -> None:
        if texts.get("msgid"):
            entries.append(Entry(texts["msgid"], texts.get("msgstr", "")))
        texts.clear()

    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.strip():
            finish()
        elif not line.startswith("#"):
            if not line.startswith('"'):
                keyword, _, line = line.partition(" ")
            texts[keyword] = texts.get(keyword, "") + ast.literal_eval(line)
    finish()
    return entries


def write_catalogue(file: Path, entries: Iterable[Entry]) -> None:
    """Writes `entries` as a .po file, sorted by their texts: a text that moves in the code moves nothing here."""
    blocks = ['msgid ""\nmsgstr ""\n"Language: ja\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"']
    for entry in sorted(entries, key=lambda entry: entry.source):
        blocks.append(f"msgid {_quote(entry.source)}\nmsgstr {_quote(entry.translation)}")
    file.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def _quote(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\b": "\\b"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'
