"""`terakoya plugins`: lists installed plugins, shows a component's settings, writes and checks a new plugin."""

from __future__ import annotations

from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError, nearest
from terakoya.log import console, translated


def show_component(
    name: Annotated[str, typer.Argument(help="A component's name, as in `terakoya plugins list`.")],
) -> None:
    """Show the settings of a component: name, type and unit, default, meaning."""
    from rich.markup import escape
    from rich.table import Table

    from terakoya.config.meanings import settings_of
    from terakoya.plugins import registry

    loaded = registry()
    found = [registration for registration in loaded.components() if registration.name == name]
    if not found:
        names = sorted({registration.name for registration in loaded.components()})
        raise UserError(f'no component is called "{name}"{nearest(name, names)} `terakoya plugins list` lists all')
    for registration in found:
        component = registration.component
        summary = (component.__doc__ or "").strip().split("\n\n")[0]
        console().print(f"{registration.kind.removesuffix('s')} {name}: {summary}", markup=False, soft_wrap=True)
        table = Table("setting", "type", "default", "meaning", box=None, header_style="bold", pad_edge=False)
        for setting in settings_of(component):
            unit = f" ({translated(setting.unit)})" if setting.unit else ""
            table.add_row(
                *map(escape, (setting.name, setting.kind + unit, setting.default, translated(setting.meaning)))
            )
        console().print(table)
    next_command.show(*_user(found[0].kind, name))


def _user(kind: str, name: str) -> tuple[str, ...]:
    """Returns the command that takes the component `name` of `kind`, or shows the key that names it."""
    commands = {
        "tokenizers": ("tokenizer", "train", "CORPUS", "--type", name, "--out", "work/tokenizer"),
        "exporters": ("export", "work/run", "--format", name, "--out", "work/model"),
        "importers": ("import", name, "CHECKPOINT", "--out", "work/model"),
        "word_finders": ("prepare", "CORPUS", "--tokenizer", "TOKENIZER", "--words", name, "--out", "work/store"),
        "launchers": ("launch", name, "bert_ja", "--out", "work/run"),
    }
    keys = {"trackers": "trackers", "events": "events", "initializers": "start_from.initializer"}
    keys["cleaning_steps"] = "clean"
    return commands.get(kind, ("parameters", "show", keys.get(kind, kind.removesuffix("s"))))


def list_plugins() -> None:
    """List every component and its origin.

    Then list the plugins that listen to events, the excluded plugins, and the plugins that do not load, with their
    errors.
    """
    from rich.table import Table

    from terakoya.plugins import registry

    loaded = registry()
    components = Table(
        "kind", "name", "module", "distribution", "version", box=None, header_style="bold", pad_edge=False
    )
    for registration in loaded.components():
        kind, version = registration.kind.removesuffix("s"), registration.version or "-"
        components.add_row(kind, registration.name, registration.module, registration.distribution, version)
    console().print(components)

    listening = [(event, plugin) for event, plugins in loaded.hook.listeners.items() for plugin, _ in plugins]
    if listening:
        events = Table("event", "plugin", box=None, header_style="bold", pad_edge=False)
        for event, plugin in listening:
            events.add_row(event, plugin)
        console().print()
        console().print(events)
    for excluded in loaded.excluded:
        console().print(f"excluded: {excluded}", markup=False, soft_wrap=True)
    for broken in loaded.broken:
        console().print("[bold red]does not load:[/bold red]", end=" ")
        console().print(str(broken), markup=False, soft_wrap=True)
    next_command.show("plugins", "show", "bert")
