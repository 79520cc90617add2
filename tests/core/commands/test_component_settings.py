"""A value of a component's setting is never an option, whatever it begins with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from command_line import call, refusal

from terakoya.commands.component_settings import ComponentCommand, _is, take_flags
from terakoya.commands.main import build_app
from terakoya.plugins import registry

KINDS = {
    "tokenizer train": "tokenizers", "tokenizer import": "tokenizers", "launch": "launchers", "move": "launchers",
    "export": "exporters", "import": "importers",
}  # fmt: skip
"""Verb -> the kind of components whose settings it takes."""


HELP: Any = {"help_option_names": ["-h", "--help"]}
VALUES = ("-h", "--help", "-h x", "-u /home/x", "-1", "--x=y", "--help-me=no", "-")


def commands(group: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Yields the verbs below `group`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield " ".join((*names, name)), command


def test_every_text_setting_of_every_verb_takes_values_with_dashes() -> None:
    every: dict[str, Any] = dict(commands(typer.main.get_command(build_app())))
    found = {verb: command for verb, command in every.items() if isinstance(command, ComponentCommand)}
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
    said = refusal(capsys, "tokenizer", "train", "c.jsonl", "--type", "mecab_wordpiece", *words)
    assert message in " ".join(said.split())


@pytest.mark.parametrize("words", [["--byte-fallback", "-h"], ["--no-such-setting", "--help"], ["-h"]])
def test_help_after_a_switch_is_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "tokenizer", "train", "c.jsonl", *words)
    assert code == 0 and "Train a tokenizer" in out


def test_every_argument_of_every_verb_takes_texts_that_begin_with_a_dash() -> None:
    texts = ["- a text", "-1", "-東京", "---", "-h and --help", "-"]
    for verb, command in commands(typer.main.get_command(build_app())):
        options = [each for each in command.params if each.param_type_name == "option"]
        flags = [each.opts[0] for each in options if each.is_flag][:1]
        needed = [each.opts[0] for each in options if each.required]
        given = [word for name in needed for word in (name, "ner" if name == "--task" else "1")]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        words = ["1"] * (len(arguments) - 1) + (texts if [each.nargs for each in arguments][-1:] == [-1] else texts[:1])
        if arguments:
            taken = command.make_context(verb, [words[0], *given, *words[1:], *flags], **HELP).params
            found = taken[arguments[-1].name]
            last = words[len(arguments) - 1 :]
            assert [str(each) for each in (found if isinstance(found, list) else [found])] == last, verb
