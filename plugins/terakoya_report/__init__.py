"""What this family adds: `terakoya report`, a page about runs, which the folder of a mirrored run holds, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from terakoya import Command, Group, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command | Group]:
    """Implements `terakoya.hookspecs.register_commands`."""
    from terakoya_report.commands import report

    return {"report": Command(report.command, "terakoya report work/run --out report.html", after="save")}


@hookimpl
def run_files(folder: Path) -> Mapping[str, str]:
    """Implements `terakoya.hookspecs.run_files`."""
    from terakoya_report.page import now, render_page
    from terakoya_report.report import read_reports

    return {"report.html": render_page(read_reports([folder]), created=now())}
