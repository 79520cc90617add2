"""`terakoya parameters show KEY`: one key of a settings file, with its type, default and meaning."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.commands.guidance import next_command

if TYPE_CHECKING:
    from terakoya.pipeline.keys import Entry

_FILE_ENDINGS = (".json", ".yaml", ".yml", ".py", ".sh", ".toml", ".cfg", ".ini")
_PLACES = {
    "parameters": "of a parameter file",
    "pipeline": "of a pipeline",
    "cleaning": "of a cleaning step",
    "tokenizer": "of a tokenizer",
    "launcher": "of a launcher",
    "exporter": "of an export format",
    "importer": "of an import format",
    "word_finder": "of a word finder",
    "command": "of a settings file of a command",
}


_NEXT = {
    "parameters": ("parameters", "show", "bert_base"),
    "pipeline": ("init",),
    "cleaning": ("parameters", "schema", "cleaning"),
    "tokenizer": ("tokenizer", "train", "-h"),
    "launcher": ("launch", "-h"),
    "exporter": ("export", "-h"),
    "importer": ("import", "-h"),
    "word_finder": ("prepare", "-h"),
}
"""File -> the command in which its keys are used."""


def is_key(given: Path) -> bool:
    """Returns whether `given` is meant as a key: no file and no preset has this name, or nearly this name, and it
    does not look like a path."""
    from terakoya.config.presets import preset_names

    text = str(given)
    if "/" in text or "\\" in text or given.suffix.lower() in _FILE_ENDINGS or given.exists():
        return False
    return not difflib.get_close_matches(text, preset_names(), n=1, cutoff=0.75)


def show(key: str) -> None:
    """Prints every entry of `key`. Raises UserError for a key that does not exist, as `find_key` does."""
    from terakoya.log import console, translated
    from terakoya.pipeline.keys import find_key
    from terakoya.plugins import registry

    entries = find_key(key, registry())
    for number, entry in enumerate(entries):
        if number:
            console().print()
        place = translated(_PLACES[entry.file])
        console().print(f"{entry.path}  ({place})", style="bold", markup=False, highlight=False)
        for line in describe(entry):
            console().print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    (types, *_), file = entries[0].defaults.values(), entries[0].file
    next_command.show(*(_NEXT[file] if file in _NEXT else (types[0].split()[0], "-h")))


def describe(entry: Entry) -> list[str]:
    """Returns the lines below the key path of `entry`."""
    from terakoya.config.meanings import FIRST_RELEASE
    from terakoya.log import translated

    setting = entry.setting
    lines = [setting.meaning, f"type: {setting.kind}"]
    if setting.unit:
        lines.append(f"unit: {translated(setting.unit)}")
    for default, types in entry.defaults.items():
        lines.append(f"default: {translated(default)}" + (f"  ({', '.join(types)})" if types else ""))
    if setting.since != FIRST_RELEASE:
        lines.append(f"since: {setting.since}")
    return lines
