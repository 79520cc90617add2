"""What plugins add to the program, verbs, languages and places, found without loading what they do."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terakoya.errors import UserError, nearest
from terakoya.hookspecs import Command, Group, Language
from terakoya.places import Place
from terakoya.plugins.discovery import (
    PLUGINS_VARIABLE,
    WITHOUT_VARIABLE,
    Broken,
    Finder,
    Plugin,
    PluginError,
    add_inherited,
    describe,
    has_hooks,
    might_have,
)
from terakoya.plugins.families import missing_family
from terakoya.plugins.verb_options import as_typer_reads

LANGUAGE_VARIABLE = "TERAKOYA_LANG"


@dataclass(frozen=True)
class Verbs:
    """The verbs of a command line.

    Attributes:
        commands: by name, in the order in which the help lists them.
        might_have: a line for each plugin in which a verb that was not found might be.
    """

    commands: Mapping[str, Command | Group]
    might_have: str


def find_verbs(own: Mapping[str, Command | Group], plugins: Sequence[str] = (), without: Sequence[str] = ()) -> Verbs:
    """Returns the verbs `own` of the core and those of the installed plugins and of `plugins`, except those that
    `without` names. Raises UserError if a requested plugin does not load, or two plugins have a verb of one name."""
    finder = Finder(without, submodules=False)
    commands, origins = dict(own), dict.fromkeys(own, "terakoya")
    options: dict[str, list[tuple[Callable[..., None], str]]] = {}
    kinds = {"register_commands": Command | Group, "register_options": Callable}
    for plugin, hook, found in _results(kinds, finder, plugins):
        if hook == "register_options":
            for name, function in found.items():
                options.setdefault(name, []).append((function, plugin.name))
            continue
        for name, command in found.items():
            if name in commands:
                raise UserError(
                    f'command "{name}" is registered twice: by {origins[name]} and by {plugin.name} ({plugin.source}); '
                    f"exclude one with --without {plugin.name}"
                )
            commands[name], origins[name] = command, plugin.name
    for name, added in options.items():
        if not isinstance(commands.get(name), Command) and not missing_family("verbs", name):
            raise UserError(f'options of {added[0][1]}: there is no command "{name}"{nearest(name, commands)}')
    for name, command in commands.items():
        if isinstance(command, Command):
            added = [(function, f"options of {plugin} for {name}") for function, plugin in options.get(name, ())]
            commands[name] = replace(command, function=as_typer_reads(command.function, added))
    for name in commands:
        group = name.rpartition(" ")[0]
        if group and not isinstance(commands.get(group), Group):
            raise UserError(f'command "{name}" of {origins[name]}: there is no group "{group}"')
    return Verbs(_in_order(commands), might_have(finder.broken, finder.excluded))


def find_language(without: Sequence[str] = ()) -> Language | None:
    """Returns the language that the environment names in `TERAKOYA_LANG`, of the installed plugins except those that
    `without` names; None for English. Raises UserError if there is no such language."""
    chosen = os.environ.get(LANGUAGE_VARIABLE) or "en"
    if chosen == "en":
        return None
    known: dict[str, Any] = {}
    for _, _, found in _results({"register_languages": object}, Finder(without, submodules=False), ()):
        known |= found
    if chosen not in known:
        family = missing_family("languages", chosen)
        raise UserError(
            f"{LANGUAGE_VARIABLE}: there is no language {chosen}{family or nearest(chosen, ['en', *known])}"
        )
    language: Language = known[chosen]()
    return language


def find_places() -> tuple[Mapping[str, Callable[[str], Place]], str]:
    """Returns the places of the plugins of this process by their scheme, and the end of a sentence for who does not
    find one. Raises UserError where two plugins have one scheme."""
    return _find_places(add_inherited(PLUGINS_VARIABLE, ()), add_inherited(WITHOUT_VARIABLE, ()))


@functools.cache
def _find_places(plugins: Sequence[str], without: Sequence[str]) -> tuple[Mapping[str, Callable[[str], Place]], str]:
    finder = Finder(without, submodules=False)
    places: dict[str, Callable[[str], Place]] = {}
    origins: dict[str, Plugin] = {}
    for plugin, _, found in _results({"register_places": Callable}, finder, plugins):
        for scheme, kind in found.items():
            if (other := origins.setdefault(scheme, plugin)) is not plugin:
                raise UserError(
                    f'places "{scheme}" are registered twice: by {other.name} and by {plugin.name} ({plugin.source}); '
                    f"exclude one with --without {plugin.name}"
                )
            places[scheme] = kind
    return places, missing_family("places", "*") + might_have(finder.broken, finder.excluded)


def _results(
    kinds: Mapping[str, Any], finder: Finder, plugins: Sequence[str]
) -> Iterator[tuple[Plugin, str, Mapping[str, Any]]]:
    """Yields what the hooks in `kinds` of each plugin return, a mapping to the kind; an installed plugin that fails is
    `finder`'s. Raises PluginError where one of `plugins` fails."""
    for plugin in [*finder.find_installed(), *(plugin for name in plugins for plugin in finder.find_requested(name))]:
        for hook, kind in kinds.items():
            function = vars(plugin.module).get(hook)
            if function is None or not has_hooks(plugin.module):
                continue
            try:
                found = function()
                if not (isinstance(found, Mapping) and all(isinstance(each, kind) for each in found.values())):
                    raise TypeError(f"expected a mapping of names to what terakoya.hookspecs says, got {found!r}")
            except Exception as error:
                failed = PluginError(plugin.name, f"{hook}: {describe(error)}")
                if plugin.source.requested:
                    raise failed from error
                finder.broken.append(Broken(plugin.name, plugin.source, failed.message))
                continue
            yield plugin, hook, found


def _in_order(commands: Mapping[str, Command | Group]) -> dict[str, Command | Group]:
    """Returns the commands with each behind the one that its `after` names, and behind those that came there before."""
    followers: dict[str | None, list[str]] = {}
    for name, command in commands.items():
        followers.setdefault(command.after if command.after in (*commands, "") else None, []).append(name)
    ordered: dict[str, Command | Group] = {}
    waiting = [*reversed(followers.get(None, [])), *reversed(followers.get("", []))]
    while waiting:
        name = waiting.pop()
        ordered[name] = commands[name]
        waiting += reversed(followers.get(name, []))
    return {**ordered, **commands}  # those that only follow each other are last
