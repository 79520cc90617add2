"""`terakoya report`: one HTML file about one run or several."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    runs: Annotated[
        list[Path], typer.Argument(help="One run's folder, or several to set side by side.", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write, for example report.html.")],
    label: Annotated[
        list[str] | None, typer.Option(help="A name for each run, in their order; default: the folders' own.")
    ] = None,
    against: Annotated[Literal["step", "hours", "tokens"], typer.Option(help="What curves are drawn over.")] = "step",
) -> None:
    """Write a page about runs: curves, restarts, parameters and what differs, counts, stores, versions.

    The file needs nothing else, no network either. Runs may be in progress.
    """
    from terakoya.errors import UserError
    from terakoya.log import console
    from terakoya.runs.report import collect
    from terakoya.runs.report_page import page

    found = collect(runs, label)
    text = page(found, made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"), against=against)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    of = f"{len(found)} runs" if len(found) > 1 else found[0].label
    console().print(f"wrote {out}: {of}, {len(text.encode()) / 1e3:,.0f} kB", markup=False, soft_wrap=True)
