"""`terakoya compare`: how sure a difference between models, runs or recipes is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya_compare.options import CompareOptions

if TYPE_CHECKING:
    from terakoya_compare.result import Comparison


@dataclass(frozen=True, kw_only=True)
class Options(CompareOptions):
    """The options of `compare`: what is compared, and where it goes."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False
    page: Annotated[
        Path | None, typer.Option(help="Also write a page: Markdown where the name ends in .md, else HTML.")
    ] = None


def command(options: Options) -> None:
    """Compare models, runs or recipes: differences with 95 % intervals and p.

    Models and runs: their losses on the same text, or with --task their scores after the same fine-tuning. Parameter
    files: each is trained with several seeds, and the losses of runs that share a seed are pairs. The first name is A,
    with which each of the others is compared.
    """
    from terakoya.atomic_files import check_writable, write_text
    from terakoya.errors import UserError
    from terakoya.launch.here import imports
    from terakoya.log import announce

    if options.page is not None:
        if options.page.is_dir():
            raise UserError(f"--page {options.page}: expected a file, got a folder")
        check_writable(options.page.parent)
    announce("terakoya compare: loads PyTorch and Transformers ...")
    with imports():
        from terakoya_compare.compare import compare_sources

    found = compare_sources(options)
    if options.page is not None:
        write_text(options.page, found.page(markdown=options.page.suffix == ".md"))
    if options.as_json:
        typer.echo(json.dumps(found.as_json(), ensure_ascii=False))
    else:
        _show(found)


def _show(found: Comparison) -> None:
    """Prints a table for each pair, the settings and the notes."""
    from rich.table import Table
    from rich.text import Text

    from terakoya.log import console
    from terakoya_compare.result import COLUMNS

    console().print(Text(found.shown_settings()), soft_wrap=True, style="dim")
    for names in dict.fromkeys(each.names for each in found.differences):
        console().print(Text(f"A: {names[0]}  B: {names[1]}"), soft_wrap=True)
        grid = Table(*COLUMNS[:2], box=None, header_style="bold", pad_edge=False)
        for name in COLUMNS[2:]:
            grid.add_column(name, justify="right")
        for each in found.differences:
            if each.names == names:
                grid.add_row(*(Text(cell) for cell in each.cells()))
        console().print(grid)
    for note in found.notes:
        console().print(note, markup=False, soft_wrap=True)
