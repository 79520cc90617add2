"""The verbs of the command line, those of plugins among them, found without loading what they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terakoya.errors import UserError
from terakoya.hookspecs import Command, Group
from terakoya.plugins.discovery import (
    Broken,
    Finder,
    Plugin,
    PluginError,
    describe,
    has_hooks,
    might_have,
)

HOOK = "register_commands"


@dataclass(frozen=True)
class Verbs:
    """The verbs of a command line.

    Attributes:
        commands: by name, in the order in which the help lists them.
        broken, excluded: plugins that might have more.
    """

    commands: Mapping[str, Command | Group]
    broken: Sequence[Broken]
    excluded: Sequence[str]

    def might_have(self) -> str:
        """Returns a line for each plugin in which a verb that was not found might be."""
        return might_have(self.broken, self.excluded)


def find_verbs(own: Mapping[str, Command | Group], plugins: Sequence[str] = (), without: Sequence[str] = ()) -> Verbs:
    """Returns the verbs `own` of the core and those of the installed plugins and of `plugins`, except those that
    `without` names.

    Raises:
        UserError: a requested plugin does not load, or two plugins have a verb of one name.
    """
    finder = Finder(without, submodules=False)
    commands, origins = dict(own), dict.fromkeys(own, "terakoya")
    for plugin in [*finder.find_installed(), *(plugin for name in plugins for plugin in finder.find_requested(name))]:
        try:
            found = _commands_of(plugin)
        except PluginError as error:
            if plugin.source.requested:
                raise
            finder.broken.append(Broken(plugin.name, plugin.source, f"{HOOK}: {error.message}"))
            continue
        for name, command in found.items():
            if name in commands:
                raise UserError(
                    f'command "{name}" is registered twice: by {origins[name]} and by {plugin.name} ({plugin.source}); '
                    f"exclude one with --without {plugin.name}"
                )
            commands[name], origins[name] = command, plugin.name
    for name in commands:
        group = name.rpartition(" ")[0]
        if group and not isinstance(commands.get(group), Group):
            raise UserError(f'command "{name}" of {origins[name]}: there is no group "{group}"')
    return Verbs(_in_order(commands), finder.broken, finder.excluded)


def _commands_of(plugin: Plugin) -> Mapping[str, Command | Group]:
    """Returns the verbs of one plugin. Raises PluginError where its hook fails or returns something else."""
    hook = vars(plugin.module).get(HOOK)
    if hook is None or not has_hooks(plugin.module):
        return {}
    try:
        found = hook()
    except Exception as error:
        raise PluginError(plugin.name, describe(error)) from error
    if not (isinstance(found, Mapping) and all(isinstance(command, Command | Group) for command in found.values())):
        raise PluginError(plugin.name, f"{HOOK}: expected a mapping of name to Command or Group, got {found!r}")
    return found


def _in_order(commands: Mapping[str, Command | Group]) -> dict[str, Command | Group]:
    """Returns the commands with each behind the one that its `after` names, and behind those that came there before."""
    followers: dict[str | None, list[str]] = {}
    for name, command in commands.items():
        followers.setdefault(command.after if command.after in commands else None, []).append(name)
    ordered: dict[str, Command | Group] = {}
    waiting = [name for name in reversed(followers.get(None, []))]
    while waiting:
        name = waiting.pop()
        ordered[name] = commands[name]
        waiting += reversed(followers.get(name, []))
    return {**ordered, **commands}  # those that only follow each other are last
