"""`terakoya plugins check`: checks a plugin against the requirements of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.log import console, lines_of, translated

if TYPE_CHECKING:
    from rich.console import Console

    from terakoya_contract.results import CheckResult

STYLES = {"passed": "green", "failed": "bold red", "warning": "yellow", "skipped": "dim"}
MARKS = {"passed": "passed", "failed": "FAILED", "warning": "warning", "skipped": "skipped"}


def command(
    plugin: Annotated[
        str, typer.Argument(help="A plugin's file, a package's folder, or a module's name.", metavar="FILE_OR_MODULE")
    ],
    train: Annotated[bool, typer.Option(help="Train a toy run with it: learn, resume, export, load.")] = True,
) -> None:
    """Check a plugin: what is required, what is missing, what to do.

    The exit status is 0 if all checks pass, else 2.
    """
    from terakoya.hookspecs import INTERFACE
    from terakoya.version import __version__
    from terakoya_contract.checking import check_plugin

    out = console()
    out.print(f"{plugin}: plugin interface {INTERFACE}, terakoya {__version__}", markup=False, soft_wrap=True)
    results: list[CheckResult] = []
    for result in check_plugin(plugin, train=train):
        if not results or results[-1].component != result.component:
            out.print(f"\n{result.component}", style="bold", markup=False, soft_wrap=True)
        results.append(result)
        show(result, out)
    failed = sum(result.status == "failed" for result in results)
    warnings = sum(result.status == "warning" for result in results)
    more = f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    passed = sum(result.status == "passed" for result in results)
    out.print(f"\n{passed} passed, {failed} failed{more}", style="bold red" if failed else "bold", highlight=False)
    if failed:
        next_command.show("plugins", "check", plugin)
        raise typer.Exit(2)
    name = next((result.component.split()[-1] for result in results if " " in result.component), None)
    next_command.show("--plugin", plugin, *(("plugins", "show", name) if name else ("plugins", "list")))


def show(result: CheckResult, out: Console) -> None:
    """Prints one result: its status, the requirement and, below it, the reason."""
    from rich.text import Text

    lines = lines_of(translated(result.requirement), out.width - 10)
    out.print(f"  {MARKS[result.status]:<8}", style=STYLES[result.status], end="")
    out.print(Text(("\n" + " " * 10).join(lines)), soft_wrap=True)
    if result.text:
        out.print(f"          {result.text}", markup=False, soft_wrap=True)
