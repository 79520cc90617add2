"""`terakoya parameters import`: converts the launch script of another program to a parameter JSON.

Any plugin's importer has this verb if it has a method `parameters(file)` that returns a `ConvertedConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya_megatron.converted_config import ConvertedConfig


def command(
    format: Annotated[str, typer.Argument(metavar="FORMAT", help="The program of the script: megatron.")],
    file: Annotated[Path, typer.Argument(help="The launch script.")],
    out: Annotated[
        Path | None, typer.Option(help="The JSON file to write. Default: print it.", show_default=False)
    ] = None,
    define: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="The value of a variable of the script; may be repeated."),
    ] = None,
) -> None:
    """Convert the launch script of another program to a parameter JSON.

    Lists how every option is converted, and the options that are not supported. Runs nothing of the script.
    """
    from terakoya.atomic_files import write_text
    from terakoya.plugins import registry
    from terakoya.plugins.create import create_component

    component = registry().component("importers", format)
    if not hasattr(component, "parameters"):
        raise UserError(f"importer {format}: reads checkpoints, no scripts")
    for each in define or ():
        if not each.partition("=")[0].isidentifier() or "=" not in each:
            raise UserError(f"--define {each}: expected NAME=VALUE, for example num_layers=24")
    settings = {"define": define} if define else {}
    if define and "define" not in component.model_fields:
        raise UserError(f"--define: scripts of the format {format} have no variables")
    importer: Any = create_component("importers", format, settings, where=f"importer {format}")
    converted: ConvertedConfig = importer.parameters(file)
    text = json.dumps(converted.parameters, indent=2, ensure_ascii=False) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    elif out.exists():
        raise UserError(f"{out}: exists already; choose a new file or remove it")
    else:
        write_text(out, text)
    _print_report(converted, file, out)


def _print_report(converted: ConvertedConfig, file: Path, out: Path | None) -> None:
    """Prints on standard error how every option was converted, and which keys are still missing."""
    from rich.table import Table
    from rich.text import Text

    from terakoya.config.parameters import Parameters
    from terakoya.log import error_console

    console = error_console()
    parts: tuple[tuple[str, Mapping[str, str], str], ...] = (
        ("mapped", converted.mapped, ""),
        ("ignored, without any loss", converted.ignored, "dim"),
        ("NOT SUPPORTED", converted.unsupported, "yellow"),
    )
    for title, options, style in parts:
        if options:
            table = Table(title, "", box=None, header_style="bold", pad_edge=False)
            for name, text in sorted(options.items()):
                table.add_row(Text(f"--{name}", style), Text(text, style))
            console.print(table)
            console.print()
    for note in converted.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    try:
        Parameters.from_dict(converted.parameters, source=str(out or "the JSON"))
    except UserError as error:
        console.print("to complete before it can run:", style="yellow")
        console.print(str(error), markup=False, soft_wrap=True)
    counts = f"{len(converted.mapped)} options are mapped, {len(converted.ignored)} ignored, "
    counts += f"{len(converted.unsupported)} not supported"
    console.print(f"{file}: {counts}{f'; written to {out}' if out else ''}", soft_wrap=True)
    if out is not None:
        next_command.show("estimate", out)
