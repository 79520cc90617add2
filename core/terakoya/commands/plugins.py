"""`terakoya plugins`: what is installed, where it came from, and what does not load."""

from __future__ import annotations

import typer

app = typer.Typer(help="What is installed and where it came from.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_plugins() -> None:
    """List every component and its origin.

    Below: who listens to events, what was left out, and plugins that do not load with their errors.
    """
    from rich.table import Table

    from terakoya.log import console
    from terakoya.plugins import registry

    loaded = registry()
    components = Table(
        "kind", "name", "module", "distribution", "version", box=None, header_style="bold", pad_edge=False
    )
    for offer in loaded.components():
        kind = offer.kind.removesuffix("s")
        components.add_row(kind, offer.name, offer.module, offer.distribution, offer.version or "-")
    console().print(components)

    listening = [(event, plugin) for event, found in loaded.hook.listeners.items() for plugin, _ in found]
    if listening:
        events = Table("event", "plugin", box=None, header_style="bold", pad_edge=False)
        for event, plugin in listening:
            events.add_row(event, plugin)
        console().print()
        console().print(events)
    for blocked in loaded.blocked:
        console().print(f"left out: {blocked}", markup=False, soft_wrap=True)
    for broken in loaded.broken:
        console().print("[bold red]does not load:[/bold red]", end=" ")
        console().print(str(broken), markup=False, soft_wrap=True)
