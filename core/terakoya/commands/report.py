"""`terakoya report`: one HTML file about one or more runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    runs: Annotated[
        list[Path], typer.Argument(help="One run folder, or several to compare side by side.", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write, for example report.html.")],
    label: Annotated[
        list[str] | None, typer.Option(help="A name for each run, in order. Default: the folders' names.")
    ] = None,
    against: Annotated[
        Literal["step", "hours", "tokens"], typer.Option(help="The horizontal axis of the curves.")
    ] = "step",
) -> None:
    """Write a page about runs: curves, restarts, parameters and their differences, counts, stores, versions.

    The file is self-contained and needs no network. Runs may be in progress.
    """
    from terakoya.atomic_files import check_writable, write_text
    from terakoya.errors import UserError
    from terakoya.folder_kinds import refuse_address
    from terakoya.log import console
    from terakoya.runs.report import read_reports
    from terakoya.runs.report_page import render_page

    refuse_address(out, "an HTML file")
    if out.is_dir():
        raise UserError(f"--out {out}: expected an HTML file, got a folder; give --out {out / 'report.html'}")
    check_writable(out.parent)
    reports = read_reports(runs, label)
    text = render_page(reports, created=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"), against=against)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    subject = f"{len(reports)} runs" if len(reports) > 1 else reports[0].label
    console().print(f"wrote {out}: {subject}, {len(text.encode()) / 1e3:,.0f} kB", markup=False, soft_wrap=True)
