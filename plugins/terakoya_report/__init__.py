"""What this family adds: `report`, a page about runs, which a mirrored run has, too, and `tokenizer report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from terakoya import Command, Group, hookimpl


@hookimpl
def register_commands() -> Mapping[str, Command | Group]:
    from terakoya_report.commands import report, tokenizer_report

    of_tokenizer = "terakoya tokenizer report work/tokenizer --corpus corpus.jsonl.gz"
    return {
        "report": Command(report.command, "terakoya report work/run --out report.html", after="save"),
        "tokenizer report": Command(tokenizer_report.command, of_tokenizer, after="tokenizer count"),
    }


@hookimpl
def run_files(folder: Path) -> Mapping[str, str]:
    from terakoya_report.page import now, render_page
    from terakoya_report.report import read_reports

    return {"report.html": render_page(read_reports([folder]), created=now())}
