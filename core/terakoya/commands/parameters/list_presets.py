"""`terakoya parameters list`: the presets."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the presets, which every command takes by name in the place of a parameter file.

    The size is the number of parameters with a vocabulary of 32,768. A file of the same name comes first.
    """
    from rich.table import Table

    from terakoya.config.presets import preset_names, read_preset
    from terakoya.log import console, translated

    presets = [read_preset(name) for name in preset_names()]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in presets], indent=2, ensure_ascii=False, default=str))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, right in (("name", False), ("architecture", False), ("size", True), ("length", True), ("for", False)):
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "for")
    for each in presets:
        table.add_row(each.name, each.architecture, each.size, f"{each.sequence_length:,}", translated(each.purpose))
    console().print(table)
    next_command.show("estimate", "bert_ja", "--vocab-size", "32768")
