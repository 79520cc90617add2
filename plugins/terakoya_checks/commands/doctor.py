"""`terakoya doctor`: reports problems of this machine or installation, and what to do about them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False) -> None:
    """Check the machine and the installation.

    Checks versions, GPU, memory, disk, ports, build locks, text encoding and more. Exits with 2 if there is an error.
    """
    from rich.cells import set_cell_size
    from rich.text import Text

    from terakoya.errors import UserError
    from terakoya.log import console, lines_of, translated
    from terakoya_checks.diagnose import diagnose

    findings = diagnose(Path.cwd())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        colours = {"ok": "green", "warning": "yellow", "error": "bold red"}
        for finding in findings:
            colour = colours[finding.status]
            status, check = set_cell_size(translated(finding.status), 8), set_cell_size(translated(finding.check), 15)
            beside = console().width - 23
            lines = lines_of(translated(finding.message), beside) or [""]
            console().print(f"[{colour}]{status}[/{colour}]{check}", end="")
            console().print(Text(("\n" + " " * 23).join(lines)), soft_wrap=True)
            if finding.remedy:
                console().print(" " * 23 + finding.remedy, markup=False, soft_wrap=True, style="dim")
    if any(finding.status == "error" for finding in findings):
        if not as_json:
            next_command.show("doctor")
        raise typer.Exit(UserError.exit_code)
    if not as_json:
        next_command.show("init")
