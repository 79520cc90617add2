"""`--clean` and `--clean-folder`, alike for every command that reads a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass


CleanOption = Annotated[Path | None, typer.Option(help="A JSON list of cleaning steps.", show_default=False)]
CleanFolderOption = Annotated[
    Path | None, typer.Option(help="Where --clean notes what it drops. Default: OUT.clean.", show_default=False)
]
