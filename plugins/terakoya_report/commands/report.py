"""`terakoya report`: one HTML page about one or more runs, as a file or served while they train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from terakoya.commands.guidance import next_command
from terakoya.plugins.verbs import LANGUAGE_VARIABLE


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(help="One run folder or address, or several to compare side by side.", metavar="RUN..."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file to write. Default: report.html in the folder of one run; with --live, none."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="A name for each run, in order. Default: the folders' names.")
    ] = None,
    against: Annotated[
        Literal["step", "hours", "tokens"], typer.Option(help="The horizontal axis of the curves.")
    ] = "step",
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page to this machine's browser and follow the runs.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --live: the port; 0 is any free one.")] = 8000,
    every: Annotated[float, typer.Option(min=0.2, help="With --live: seconds between two updates.")] = 5.0,
) -> None:
    """Write a page about runs: curves, samples, phases, parameters and their differences, counts, stores, versions.

    The file is self-contained and needs no network. Runs may be in progress; with --live a browser on this machine
    follows them, until Ctrl-C, and --out is written again with each update.
    """
    from terakoya.atomic_files import check_writable
    from terakoya.errors import UserError
    from terakoya.log import console, plural
    from terakoya.places import check_local, is_local, open_views
    from terakoya_report.page import live_scripts, now, render_main, render_page
    from terakoya_report.report import RunReport, read_reports

    if out is None and not live:
        if len(runs) > 1 or not is_local(runs[0]):
            raise UserError("expected --out, the HTML file to write, or --live")
        out = runs[0] / "report.html"
    if out is not None:
        check_local(out, "an HTML file")
        if out.is_dir():
            raise UserError(f"--out {out}: expected an HTML file, got a folder; give --out {out / 'report.html'}")
        check_writable(out.parent)

    def read() -> tuple[list[RunReport], str]:
        with open_views(runs) as folders:
            return read_reports(folders, label), now()

    language = os.environ.get(LANGUAGE_VARIABLE) or "en"
    reports, created = read()
    if out is not None:
        _write(out, render_page(reports, created=created, against=against, language=language))
        subject = f"{len(reports)} runs" if len(reports) > 1 else reports[0].label
        size = out.stat().st_size / 1e3 if out.is_file() else 0
        console().print(f"wrote {out}: {subject}, {size:,.0f} kB", markup=False, soft_wrap=True)
    if not live:
        if len(runs) == 1 and is_local(runs[0]):
            next_command.after_run(runs[0], shown=True)
        else:
            next_command.show("status", *runs)
        return

    from terakoya_report.live import HOST, LivePage, create_server

    def main() -> str:
        found, at = read()
        if out is not None:
            _write(out, render_page(found, created=at, against=against, language=language))
        return render_main(found, created=at, against=against)

    def whole() -> str:
        found, at = read()
        return render_page(found, created=at, against=against, live_every=every, language=language)

    try:
        server = create_server(LivePage(whole, main, every=every), port=port, scripts=live_scripts())
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another, or 0 for any that is free") from None
    with server:
        address = f"http://{HOST}:{server.server_port}/"
        console().print(
            f"follow the run{plural(len(runs))} at {address} until Ctrl-C; from another machine: "
            f"ssh -L {server.server_port}:{HOST}:{server.server_port} THIS_HOST",
            markup=False, soft_wrap=True,
        )  # fmt: skip
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _write(out: Path, text: str) -> None:
    from terakoya.atomic_files import write_text

    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
