"""Commands in pages, compared with the command line."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import typer

from terakoya import plugins
from terakoya.commands.main import build_app

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"export": "exporters", "import": "importers", "launch": "launchers", "move": "launchers"}
"""Verb -> the kind of component whose settings are options of it."""


@functools.cache
def root_command() -> Any:
    return typer.main.get_command(build_app())


def verbs() -> list[str]:
    """Returns the names of all verbs and groups in the order of use."""
    return [name for name in root_command().verbs.commands if " " not in name]


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `terakoya WORDS` means, and the words that are left."""
    command = root_command()
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        words = words[1:]
    return command, words


def check_command(text: str) -> None:
    """Fails unless the verbs and the flags of the command `text` exist."""
    words = shlex.split(re.split(r"\s#\s|\s>\s", text)[0], comments=False)
    assert words[0] == "terakoya", text
    first = 1
    top = {flag for parameter in find_command([])[0].params for flag in parameter.opts}
    while first < len(words) and words[first] in top:
        first += 2  # an option before the verb and its value
    command, rest = find_command(words[first:])
    known = {flag for parameter in command.params for flag in [*parameter.opts, *parameter.secondary_opts]} | {"--help"}
    if command.ignore_unknown_options:  # every setting of a kind of component is an option too
        known |= settings_flags(KINDS.get(words[first], "tokenizers"))
    values = 0
    for before, word in itertools.pairwise(["", *rest]):
        if word.startswith("--"):
            assert word.split("=")[0] in known, f"{text}: {word} is not an option of it; known: {sorted(known)}"
        values += not word.startswith("--") and not before.startswith("--")
    arguments = any(parameter.param_type_name == "argument" for parameter in command.params)
    assert arguments or not values, f"{text}: no such verb"


@functools.cache
def settings_flags(plural: str) -> set[str]:
    """Every setting of every tokenizer (exporter, importer) as an option, as `terakoya plugins show` and SentencePiece
    spell it, and SentencePiece's names for corpus and folder."""
    registry = plugins.registry()
    kinds = [registry.component(plural, name) for name in registry.names(plural)]
    names = {name for kind in kinds for name in kind.model_fields}
    names |= {"input", "output_dir", "model_prefix"} if plural == "tokenizers" else set()
    return {f"--{spelt}" for name in names for spelt in (name, name.replace("_", "-"))}
