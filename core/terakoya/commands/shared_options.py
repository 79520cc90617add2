"""Options that several commands share: those of terakoya itself, --set, with what a shell completes after it, and how
a corpus is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

    from terakoya.config.meanings import Setting
    from terakoya.corpus.corpus import Reading

READING = ("documents", "field", "encoding", "max_rejects")
"""The options that say how a corpus is read, by which `PrepareOptions` calls them."""


def plugin_options(plugins: Sequence[str] | None, without: Sequence[str] | None) -> list[tuple[str, str]]:
    """Returns the options of terakoya itself, and their values, that load `plugins` and exclude those of `without`."""
    return [*(("--plugin", each) for each in plugins or ()), *(("--without", each) for each in without or ())]


def complete_parameters(incomplete: str) -> list[tuple[str, str]]:
    """Returns what may follow --set of a command that reads parameters: each key path and `=`, or the values of a key
    that has a few, with their meaning."""
    from terakoya.config.keys import parameter_groups
    from terakoya.plugins import registry

    found: dict[str, str] = {}
    for group in parameter_groups(registry()):
        for setting in group.settings:
            for text, meaning in _choices(group.path.replace(".N.", ".0.") + setting.name, setting, incomplete):
                found.setdefault(text, meaning)
    return list(found.items())


def complete_tokenizer(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Returns what may follow --set of a command about a tokenizer, of the kind in --type if it is given."""
    from terakoya.config.meanings import settings_of
    from terakoya.plugins import registry

    loaded = registry()
    names = loaded.names("tokenizers")
    given = context.params.get("type")
    found: dict[str, str] = {}
    for name in [given] if given in names else names:
        kind: type[BaseModel] = loaded.component("tokenizers", name)
        for setting in settings_of(kind):
            for text, meaning in _choices(setting.name, setting, incomplete):
                found.setdefault(text, meaning)
    return list(found.items())


def _choices(path: str, setting: Setting, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yields `path=` if `incomplete` begins it, or `path=value` for each value of a choice."""
    meaning = setting.meaning.split(". ")[0].replace("[", r"\[")  # typer reads rich's markup in it
    if "=" not in incomplete:
        if path.startswith(incomplete) and setting.kind not in ("object", "object or null"):
            yield f"{path}=", meaning
        return
    if incomplete.startswith(f"{path}=") and not re.search("list of|object of", setting.kind):
        for value in setting.kind.split(" or "):
            if value[:1] == '"':
                value = json.loads(value)
            elif value not in ("true", "false", "null"):
                continue
            if f"{path}={value}".startswith(incomplete):
                yield f"{path}={value}", meaning


ParametersSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a value over the file's; may be repeated. `terakoya parameters show KEY` explains a key.",
        autocompletion=complete_parameters,
    ),
]

NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help='The number of nodes, for a batch_size of {"*": ROWS}: the rows of each.'),
]


def reading(options: Any) -> Reading:
    """Returns how a corpus is read, as those of the options say that an options object has."""
    return {name: getattr(options, name) for name in READING if hasattr(options, name)}  # type: ignore[return-value]
