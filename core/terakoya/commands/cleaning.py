"""The options `--clean` and `--clean-folder`, the same for every command that reads a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CleanOption = Annotated[
    Path | None, typer.Option(help="A list of cleaning steps, as JSON or YAML.", show_default=False)
]
CleanFolderOption = Annotated[
    Path | None, typer.Option(help="Where --clean keeps its decisions. Default: OUT.clean.", show_default=False)
]
