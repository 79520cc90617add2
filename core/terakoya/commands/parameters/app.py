"""`terakoya parameters`: presets, complete parameters with their origins, the JSON Schema, conversion of scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.parameters import import_script, list_presets

app = typer.Typer(help="Show and create parameter files.", no_args_is_help=True, rich_markup_mode=None)
app.command("list")(list_presets.command)
app.command("import")(import_script.command)


@app.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="A parameter JSON, or the name of a preset.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a value; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the complete JSON instead.")] = False,
) -> None:
    """Show every value and its origin.

    The origin is `default`, `file` or `command line`.
    """
    from rich.table import Table

    from terakoya.config.parameters import Parameters
    from terakoya.config.presets import find_parameters
    from terakoya.json_settings import leaves, origins, read_settings
    from terakoya.log import console

    file, overrides = find_parameters(file), overrides or []
    complete = Parameters.load(file, overrides).dump()
    if as_json:
        typer.echo(json.dumps(complete, indent=2, ensure_ascii=False))
        return
    origin = origins(complete, read_settings(file), overrides)
    table = Table("key", "value", "origin", box=None, header_style="bold", pad_edge=False)
    for key, value in leaves(complete):
        style = {"default": "dim", "file": "", "command line": "bold"}[origin[key]]
        table.add_row(key, json.dumps(value, ensure_ascii=False), origin[key], style=style)
    console().print(table)


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of parameter files.

    Every installed component is one choice of its key, by its `type`.
    """
    from terakoya.config.schema import json_schema
    from terakoya.plugins import registry

    typer.echo(json.dumps(json_schema(registry()), indent=2, ensure_ascii=False))
