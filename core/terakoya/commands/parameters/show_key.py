"""`terakoya parameters show KEY`: one key of a settings file, with its type, default and meaning."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.commands.guidance import next_command
from terakoya.log import console, translated

if TYPE_CHECKING:
    from terakoya.config.keys import Entry

_FILE_ENDINGS = (".json", ".yaml", ".yml", ".py", ".sh", ".toml", ".cfg", ".ini")
_FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "parameters": ("of a parameter file", ("parameters", "show", "bert_ja")),
    "pipeline": ("of a pipeline", ("init",)),
    "cleaning": ("of a cleaning step", ("parameters", "schema", "cleaning")),
    "tokenizer": ("of a tokenizer", ("tokenizer", "train", "-h")),
    "launcher": ("of a launcher", ("launch", "-h")),
    "exporter": ("of an export format", ("export", "-h")),
    "importer": ("of an import format", ("import", "-h")),
    "word_finder": ("of a word finder", ("prepare", "-h")),
    "command": ("of a settings file of a command", ()),
}
"""File -> what its keys are of, and the command in which they are used."""


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
    from terakoya.config.keys import find_key
    from terakoya.plugins import registry

    entries = find_key(key, registry())
    for number, entry in enumerate(entries):
        if number:
            console().print()
        place = translated(_FILES[entry.file][0])
        console().print(f"{entry.path}  ({place})", style="bold", markup=False, highlight=False)
        for line in describe(entry):
            console().print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    (types, *_), following = entries[0].defaults.values(), _FILES[entries[0].file][1]
    next_command.show(*(following or (types[0].split()[0], "-h")))


def describe(entry: Entry) -> list[str]:
    """Returns the lines below the key path of `entry`."""
    from terakoya.config.meanings import FIRST_RELEASE

    setting = entry.setting
    lines = [setting.meaning, f"type: {setting.kind}"]
    if setting.unit:
        lines.append(f"unit: {translated(setting.unit)}")
    for default, types in entry.defaults.items():
        lines.append(f"default: {translated(default)}" + (f"  ({', '.join(types)})" if types else ""))
    if setting.since != FIRST_RELEASE:
        lines.append(f"since: {setting.since}")
    return lines
