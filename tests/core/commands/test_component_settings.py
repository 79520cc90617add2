"""A value of a component's setting is never an option, whatever it begins with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from terakoya.commands.component_settings import ComponentCommand, _is, take_flags
from terakoya.commands.main import build_app, main
from terakoya.plugins import registry

KINDS = {
    "tokenizer train": "tokenizers", "tokenizer import": "tokenizers", "launch": "launchers", "move": "launchers",
    "export": "exporters", "import": "importers",
}  # fmt: skip
"""Verb -> the kind of components whose settings it takes."""


HELP: Any = {"help_option_names": ["-h", "--help"]}
VALUES = ("-h x", "-u /home/x", "-1", "--x=y", "--help-me=no", "-")


def commands(group: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Yields the verbs below `group` that take settings of components."""
    for name, command in group.commands.items():
        if isinstance(command, ComponentCommand):
            yield " ".join((*names, name)), command
        elif hasattr(command, "commands"):
            yield from commands(command, *names, name)


def test_every_text_setting_of_every_verb_takes_values_with_dashes() -> None:
    found: dict[str, Any] = dict(commands(typer.main.get_command(build_app())))
    assert set(found) == set(KINDS)
    tried: set[str] = set()
    for verb, command in found.items():
        for name in registry().names(KINDS[verb]):
            fields = registry().component(KINDS[verb], name).model_fields
            keys = [key for key, field in fields.items() if _is(field.annotation, str)]
            options = [f"--{key.replace('_', '-')}" for key in keys]
            for value in VALUES if keys else ():
                for words in (
                    [word for each in options for word in (each, value)],
                    [f"{each}={value}" for each in options],
                ):
                    context = command.make_context(verb, ["first", "second", *words, "third", "--out", "o"], **HELP)
                    taken = context.params[next(each.name for each in command.params if each.nargs == -1)]
                    rest, flags = take_flags(taken, fields, verb=verb)
                    assert (rest, flags) == (["first", "second", "third"], dict.fromkeys(keys, value)), (verb, words)
                    tried.add(verb)
    assert tried >= {"tokenizer train", "launch", "move"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mecab-option", "--vocab-size", "8"], "--mecab-option: expected a value after it; one that begins with"),
        (["--mecab-option", "--vocab-size=8"], "--mecab-option: expected a value after it"),
        (["--mecab-option", "--set", "vocab_size=8"], "--mecab-option: expected a value after it"),
        (["--mecab-option", "--userdic"], "is written --mecab-option=VALUE"),
    ],
)
def test_an_option_is_no_value(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["tokenizer", "train", "c.jsonl", "--type", "mecab_wordpiece", *words])
    assert left.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


def test_help_after_a_setting_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["tokenizer", "train", "c.jsonl", "--mecab-option", "-h"])
    assert left.value.code == 0 and "Train a tokenizer" in capsys.readouterr().out
