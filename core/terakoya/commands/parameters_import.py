"""`terakoya parameters import`: the script that started a run of another program becomes a parameter JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.components import ConvertedConfig, Importer


def command(
    format: Annotated[str, typer.Argument(metavar="FORMAT", help="Whose script it is: megatron.")],
    file: Annotated[Path, typer.Argument(help="The script that started the run.")],
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON there. Default: print it.", show_default=False)
    ] = None,
    define: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What a variable of the script holds; may be repeated."),
    ] = None,
) -> None:
    """Make a parameter JSON of the script that started a run of another program.

    What every option became is told; so is what has no place. Nothing of the script is run.
    """
    from terakoya.plugins import registry
    from terakoya.plugins.create import create_component

    component = registry().component("importers", format)
    for each in define or ():
        if not each.partition("=")[0].isidentifier() or "=" not in each:
            raise UserError(f"--define {each}: expected NAME=VALUE, for example num_layers=24")
    settings = {"define": define} if define else {}
    if define and "define" not in component.model_fields:
        raise UserError(f"--define: the format {format} reads no scripts with variables")
    importer: Importer = create_component("importers", format, settings, where=f"importer {format}")
    found = importer.parameters(file)
    text = json.dumps(found.parameters, indent=2, ensure_ascii=False) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    elif out.exists():
        raise UserError(f"{out}: is there already; choose a new file or remove it")
    else:
        out.write_text(text, encoding="utf-8")
    _report(found, file, out)


def _report(found: ConvertedConfig, file: Path, out: Path | None) -> None:
    """Says on the error console what became of every option, and what the JSON still lacks."""
    from rich.table import Table
    from rich.text import Text

    from terakoya.config.parameters import Parameters
    from terakoya.log import error_console

    console = error_console()
    parts: tuple[tuple[str, Mapping[str, str], str], ...] = (
        ("became", found.mapped, ""),
        ("dropped: nothing is lost", found.ignored, "dim"),
        ("NO PLACE", found.unsupported, "yellow"),
    )
    for title, options, style in parts:
        if options:
            table = Table(title, "", box=None, header_style="bold", pad_edge=False)
            for name, text in sorted(options.items()):
                table.add_row(Text(f"--{name}", style), Text(text, style))
            console.print(table)
            console.print()
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    try:
        Parameters.from_dict(found.parameters, source=str(out or "the JSON"))
    except UserError as error:
        console.print("still to be said before it can run:", style="yellow")
        console.print(str(error), markup=False, soft_wrap=True)
    counts = f"{len(found.mapped)} options became keys, {len(found.ignored)} are dropped, {len(found.unsupported)}"
    console.print(f"{file}: {counts} have no place{f'; written to {out}' if out else ''}", soft_wrap=True)
