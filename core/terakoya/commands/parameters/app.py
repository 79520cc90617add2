"""`terakoya parameters show`: complete parameters with their origins, and single keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.parameters import show_key
from terakoya.commands.shared_options import NodesOption, ParametersSet


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The options of `parameters show`."""

    file: Annotated[
        Path, typer.Argument(help="A parameter file, the name of a preset, or a key.", metavar="PARAMETERS.json | KEY")
    ]
    overrides: ParametersSet = None
    nodes: NodesOption = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the complete JSON instead.")] = False
    read: Callable[[Path], Mapping[str, Any]] | None = None
    """Reads the file of another program as a parameter JSON, for which `train` has the options `further`; no option."""
    further: Sequence[str] = ()


def show_parameters(options: ShowOptions) -> None:
    """Show every value of a parameter file and its origin; or one key: its type, default and meaning.

    The origin is `default`, `file` or `command line`. A key is a key path or its last part, also of a pipeline, of
    cleaning steps, of a tokenizer or of a launcher: parameters show learning_rate
    """
    if show_key.is_key(options.file):
        show_key.show(str(options.file))
        return
    from rich.table import Table

    from terakoya.config.parameters import Parameters
    from terakoya.config.presets import find_parameters
    from terakoya.json_settings import leaves, origins, read_settings
    from terakoya.log import console

    file, overrides, nodes = find_parameters(options.file), options.overrides or [], options.nodes
    complete = Parameters.load(file, overrides, nodes=nodes or "any", read=options.read).dump()
    if options.as_json:
        typer.echo(json.dumps(complete, indent=2, ensure_ascii=False))
        return
    origin = origins(complete, (options.read or read_settings)(file), overrides)
    table = Table("key", "value", "origin", box=None, header_style="bold", pad_edge=False)
    for key, value in leaves(complete):
        style = {"default": "dim", "file": "", "command line": "bold"}[origin[key]]
        table.add_row(key, json.dumps(value, ensure_ascii=False), origin[key], style=style)
    console().print(table)
    sets = [word for each in overrides for word in ("--set", each)]
    sets += [] if nodes is None else ["--nodes", str(nodes)]
    next_command.show("train", options.file, *options.further, "--out", "work/run", "--dry-run", *sets)
