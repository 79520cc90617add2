"""Every key of every settings file, in groups: what `terakoya parameters show KEY`, the completion of --set and the
reference page print. Types, defaults and meanings are those of `config/meanings.py`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from terakoya.components import Component
from terakoya.config.fields import ParameterFields
from terakoya.config.meanings import FIRST_RELEASE, Setting, settings_of, summary
from terakoya.config.other_names import find_equivalent
from terakoya.config.parameters import COMPONENTS
from terakoya.errors import UserError
from terakoya.json_settings.problems import models_in
from terakoya.plugins import Registry

File = Literal[
    "parameters", "pipeline", "cleaning", "tokenizer", "launcher", "exporter", "importer", "word_finder", "command"
]
"""The kinds of settings: of a run, of `terakoya run`, of --clean, and of the commands that take one
component or a file of their own."""

_OF_COMPONENTS: Mapping[File, str] = {
    "cleaning": "cleaning_steps",
    "tokenizer": "tokenizers",
    "launcher": "launchers",
    "exporter": "exporters",
    "importer": "importers",
    "word_finder": "word_finders",
}


@dataclass(frozen=True)
class Group:
    """The keys of one object of a settings file.

    Attributes:
        file: the kind of file.
        path: the key path of the object, with a dot at its end; "" at the top. A list's items have the key N, entries
            with names of the user's own have NAME.
        type: the value of `type` with which the object has these keys; "" where it has them always.
        summary: what the object is, a sentence.
        settings: its keys; their names are those in the object.
    """

    file: File
    path: str
    type: str
    summary: str
    settings: Sequence[Setting]


def parameter_groups(registry: Registry) -> Iterator[Group]:
    """Yields the groups of the parameter file: its top, its objects, and the components of each kind."""
    yield from _groups_of("parameters", ParameterFields, "")
    further = [("trackers.N", "trackers"), ("start_from.initializer", "initializers")]
    for key, kind in [*COMPONENTS.items(), *further]:
        names = " or ".join(f'"{name}"' for name in registry.names(kind))
        which = f"Which of the {kind} it is; the other keys of this object are those of its type."
        summary = f"The {kind}, of which `type` chooses one. Each has keys of its own."
        yield Group(
            "parameters", f"{key}.", "", summary, [Setting("type", names, "(required)", which, "", FIRST_RELEASE)]
        )
        yield from _component_groups("parameters", kind, f"{key}.", registry)
    for name in registry.names("events"):
        yield from _groups_of("parameters", registry.component("events", name), f"events.{name}.")


def all_groups(registry: Registry) -> Iterator[Group]:
    """Yields the groups of every file."""
    yield from parameter_groups(registry)
    if (pipeline := registry.settings.get("run")) is not None:
        yield from _groups_of("pipeline", pipeline, "")
    for file, kind in _OF_COMPONENTS.items():
        yield from _component_groups(file, kind, "", registry)
    for words, model in registry.settings.items():
        if words != "run":
            yield from _groups_of("command", model, "", words)


def _groups_of(file: File, model: type[BaseModel], path: str, type: str = "") -> Iterator[Group]:
    """Yields the group of `model`, and those of the objects in it that are no components."""
    yield Group(file, path, type, summary(model), settings_of(model))
    for name, field in model.model_fields.items():
        for inner, ending in models_in(field.annotation):
            if not issubclass(inner, Component):
                yield from _groups_of(file, inner, f"{path}{name}{ending}.", type)


def _component_groups(file: File, kind: str, path: str, registry: Registry) -> Iterator[Group]:
    for each in registry.components():
        if each.kind == kind:
            yield from _groups_of(file, each.component, path, each.name)


# ------------------------------------------------------------------------------------------- one key


@dataclass(frozen=True)
class Entry:
    """One key as it is explained: components whose key of this name is the same share an entry.

    Attributes:
        path: the key path.
        file: the kind of file that has it.
        setting: its type, meaning and unit, and the default of the first component.
        defaults: default -> the types of the components that have it; without types where every object has the key.
    """

    path: str
    file: File
    setting: Setting
    defaults: Mapping[str, Sequence[str]]


def find_key(key: str, registry: Registry) -> list[Entry]:
    """Returns the entries of `key`: a key path, or the last part of one; a number or a name in it may be any. A name of
    another trainer, such as `lr`, finds the key that has its meaning here. Raises UserError if there is no such key;
    the message names the nearest."""
    groups = list(all_groups(registry))
    entries = list(_entries(groups))
    paths = list(dict.fromkeys(entry.path for entry in entries))
    wanted = [part for part in key.split(".") if part]
    found = [entry for entry in entries if wanted and _matches(entry.path.split("."), wanted)]
    if not found and wanted:
        found = [entry for entry in entries if entry.path.rpartition(".")[2] == key]
    if not found:
        equivalents, sentence = find_equivalent(key.rpartition(".")[2], paths)
        if sentence:
            raise UserError(f"{key}: there is no such key; {sentence}")
        found = [entry for entry in entries if entry.path in equivalents]
    if found:
        return found
    near = difflib.get_close_matches(key, [*paths, *(path.rpartition(".")[2] for path in paths)], n=3, cutoff=0.6)
    advice = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    raise UserError(f"{key}: there is no such key; {advice}`terakoya parameters schema` prints all keys")


def _matches(path: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(path) == len(wanted) and all(
        own == given or (own == "N" and given.isdigit()) or own == "NAME"
        for own, given in zip(path, wanted, strict=True)
    )


def _entries(groups: Iterable[Group]) -> Iterator[Entry]:
    found: dict[tuple[str, ...], tuple[Group, Setting, dict[str, list[str]]]] = {}
    for group in groups:
        for setting in group.settings:
            same = (group.file, group.path + setting.name, setting.kind, setting.meaning)
            _, _, defaults = found.setdefault(same, (group, setting, {}))
            defaults.setdefault(setting.default, []).extend([group.type] if group.type else [])
    for (_, path, _, _), (group, setting, defaults) in found.items():
        yield Entry(path, group.file, setting, defaults)
