"""The presets: parameter files that come with terakoya, known by their names.

They are the folder `parameters/` of the sources, which is `terakoya/presets` in an installed package.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, kind_of
from terakoya.json_settings import read_value
from terakoya.places import is_local


@dataclass(frozen=True)
class Preset:
    """A preset, as `terakoya parameters list` shows it.

    Attributes:
        size: its number of parameters with a vocabulary of 32,768, such as "111 M".
        purpose: one line about what it is for.
    """

    name: str
    file: Path
    architecture: str
    size: str
    sequence_length: int
    purpose: str


@cache
def presets_folder() -> Path:
    """Returns the folder of the presets: in the installed package, or in the sources."""
    with resources.as_file(resources.files("terakoya")) as package:
        installed = package / "presets"
        return installed if installed.is_dir() else package.parents[1] / "parameters"


def preset_names() -> list[str]:
    """Returns the names of all presets, sorted."""
    return sorted(file.stem for file in presets_folder().glob("*.json"))


def read_preset(name: str) -> Preset:
    """Returns the preset `name`."""
    file = presets_folder() / f"{name}.json"
    raw: Mapping[str, Any] = read_value(file)
    size, _, purpose = raw["_comment"].partition(" parameters: ")
    return Preset(name, file, raw["architecture"]["type"], size, raw["data"]["sequence_length"], purpose)


def find_parameters(given: Path | str) -> Path:
    """Returns the parameter file that `given` means: the file of that path or, if there is none, the preset of that
    name, such as `bert_base`. A path that is neither is returned unchanged if it looks like a path. Raises UserError if
    `given` is a plain name, and no file and no preset has it; or if a text, a store or a model is there."""
    path = Path(given)
    if path.exists() or not is_local(path):
        of_run = path.is_file() and path.with_name("parameters.json").is_file()  # such as its metrics.jsonl
        if not of_run and kind_of(path) in ("corpus", "token store", "tokenizer", "Transformers model"):
            raise UserError(f"{path}: expected a parameter file, got {describe_found(path, 'parameter file')}")
        return path
    names = preset_names()
    if path.name == str(path) and path.name in names:
        return presets_folder() / f"{path.name}.json"
    stem = path.stem if path.suffix in (".json", ".yaml", ".yml") else path.name
    if stem in names:
        raise UserError(f"{path}: no such file; the preset of that name is given without folder and ending: {stem}")
    if path.name != str(path) or path.suffix:
        return path
    near = difflib.get_close_matches(path.name, names, n=2, cutoff=0.6)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(
        f"{path}: no such file, and no preset has that name; {advice}`terakoya parameters list` shows all presets"
    )
