"""`terakoya plugins check`: whether a plugin keeps what its kind promises, in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from terakoya.contract import Finding

STYLES = {"kept": "green", "wrong": "bold red", "warning": "yellow", "not looked at": "dim"}
MARKS = {"kept": "ok", "wrong": "WRONG", "warning": "warning", "not looked at": "-"}


def command(
    plugin: Annotated[
        str, typer.Argument(help="A plugin's file, a package's folder, or a module's name.", metavar="FILE_OR_MODULE")
    ],
    train: Annotated[bool, typer.Option(help="Make a toy run of it: learn, resume, export, load.")] = True,
) -> None:
    """Check a plugin of your own: what it promises, what is missing, what to do.

    Exit status 0 if all is well, 2 if something is wrong.
    """
    from terakoya.contract import check_plugin
    from terakoya.hookspecs import INTERFACE
    from terakoya.log import console
    from terakoya.version import __version__

    out = console()
    out.print(f"{plugin}: plugin interface {INTERFACE}, terakoya {__version__}", markup=False, soft_wrap=True)
    found: list[Finding] = []
    for finding in check_plugin(plugin, train=train):
        if not found or found[-1].component != finding.component:
            out.print(f"\n{finding.component}", style="bold", markup=False, soft_wrap=True)
        found.append(finding)
        show(finding, out)
    wrong = sum(finding.verdict == "wrong" for finding in found)
    warnings = sum(finding.verdict == "warning" for finding in found)
    more = f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    kept = sum(finding.verdict == "kept" for finding in found)
    out.print(f"\n{kept} promises kept, {wrong} not{more}", style="bold red" if wrong else "bold", highlight=False)
    if wrong:
        raise typer.Exit(2)


def show(finding: Finding, out: Console) -> None:
    """One finding: a mark, the promise, and below it what is wrong."""
    out.print(f"  {MARKS[finding.verdict]:<8}", style=STYLES[finding.verdict], end="")
    out.print(finding.promise, markup=False, soft_wrap=True)
    if finding.text:
        out.print(f"          {finding.text}", markup=False, soft_wrap=True)
