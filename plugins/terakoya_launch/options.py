"""What is said of a run besides its parameters and its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.shared_options import NodesOption, ParametersSet


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of `launch` and `move` about the run. What the help of an option says is not repeated here.

    Attributes:
        nodes: see `Parameters.from_dict`; by default the number that the launcher's settings name.
        global_options: options of `terakoya` itself, such as `--plugin FILE`.
    """

    work_folder: Annotated[
        Path | None,
        typer.Option(help="With an address in --out: the run's folder on the nodes. Default: in the user's cache."),
    ] = None
    folder: Annotated[Path | None, typer.Option(help="The folder for the files. Default: OUT.launch.")] = None
    nodes: NodesOption = None
    name: Annotated[str | None, typer.Option(help="The job's name. Default: the name of the run's folder.")] = None
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="A JSON or YAML file with the launcher's settings.")
    ] = None
    overrides: ParametersSet = None
    allow_change: Annotated[
        Sequence[str], typer.Option(help="A parameter that may differ from the checkpoint's, as with train.")
    ] = ()
    global_options: Sequence[str] = ()
