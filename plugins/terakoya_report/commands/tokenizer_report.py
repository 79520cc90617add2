"""`terakoya tokenizer report`: compares how tokenizers encode a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import reading
from terakoya.errors import UserError
from terakoya.preparation.options import Documents, PrepareOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tokenizer report`."""

    folders: Annotated[list[Path], typer.Argument(help="One tokenizer's folder, or several.", metavar="TOKENIZER...")]
    corpus: Annotated[list[Path], typer.Option(help="The text, as for `terakoya prepare`; may be repeated.")]
    html: Annotated[Path | None, typer.Option(help="Also write one page with charts.", show_default=False)] = None
    documents: Annotated[Documents, PrepareOptions] = "blank"
    field: Annotated[str, PrepareOptions] = "text"
    encoding: Annotated[str | None, PrepareOptions] = None
    sample_bytes: Annotated[int, typer.Option(min=0, help="Read about this many bytes of the text; 0 means all.")] = (
        20_000_000
    )


def command(options: Options) -> None:
    """Show how tokenizers encode a text: characters per token, unknown and split words, coverage, unused pieces."""
    from rich.table import Table
    from rich.text import Text

    from terakoya.atomic_files import check_writable, write_text
    from terakoya.log import console, progress_bar, translated
    from terakoya_report.tokenizer_page import render_page, summary_figures
    from terakoya_report.tokenizer_report import report_tokenizers

    if options.html is not None and not options.html.parent.is_dir():
        raise UserError(f"--html {options.html}: no such folder: {options.html.parent}")
    if options.html is not None:
        check_writable(options.html.parent)
    with progress_bar("report") as progress:
        reports = report_tokenizers(
            options.folders, options.corpus, sample_bytes=options.sample_bytes or None, progress=progress,
            **reading(options),
        )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for measured in reports:
        table.add_column(Text(measured.name), justify="right")
    columns = [summary_figures(measured) for measured in reports]
    for name in columns[0]:
        table.add_row(translated(name), *(translated(column[name]) for column in columns))
    for name in reports[0].coverage:
        coverages = [measured.coverage.get(name) for measured in reports]
        cells = ["" if each is None else f"{100 * each.known / each.characters:.2f} %" for each in coverages]
        table.add_row(translated(f"known {translated(name)}"), *cells)
    for number in range(5):
        longest = [measured.longest(5) for measured in reports]
        cells = [f"{pieces[number][0]} {pieces[number][1]:,}" if number < len(pieces) else "" for pieces in longest]
        table.add_row(
            translated("longest pieces") if number == 0 else "", *(cell.replace("[", "\\[") for cell in cells)
        )
    console().print(table)
    if options.html is not None:
        write_text(options.html, render_page(reports, corpus=", ".join(map(str, options.corpus))))
        console().print(f"{options.html}: written", markup=False, soft_wrap=True)
    next_command.after_tokenizer(options.folders[0], options.corpus, next_command.reading_words(options))
