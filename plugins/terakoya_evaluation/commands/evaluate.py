"""`terakoya evaluate`: measures loss and perplexity of a model, or the losses of a run's objective."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError
from terakoya.log import console, error_console, translated
from terakoya_evaluation.options import EvaluateOptions

if TYPE_CHECKING:
    from rich.table import Table

    from terakoya_evaluation.result import Evaluation

COUNTS = ("documents", "lines", "pieces", "rows", "tokens", "masked", "targets", "characters")
"""Names of the numbers that are counts; they are shown last."""
IN_JSON = ("bits_per_byte", "masked_bits_per_byte", "bytes")
"""What a table of 80 columns has no space for."""


@dataclass(frozen=True, kw_only=True)
class Options(EvaluateOptions):
    """The options of `evaluate`: what is measured, and where it goes."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
    out: Annotated[
        Path | None, typer.Option(help="Also write the JSON to this file, which `upload --evaluation` takes.")
    ] = None


def command(options: Options) -> None:
    """Measure a model.

    Causal models: loss and perplexity of documents; long documents are read in overlapping windows. Masked models:
    pseudo-perplexity; tokens are masked one at a time. A run or checkpoint on stores: the losses of its objective.
    """
    from terakoya_evaluation.evaluate import evaluate_model

    check_out(options)
    with error_console().status(translated("evaluating"), spinner="dots"):
        evaluation = evaluate_model(options)
    show(options, evaluation)


def check_out(options: Options) -> None:
    """Raises UserError where `--out` cannot be written."""
    from terakoya.atomic_files import check_writable

    if options.out is not None:
        if options.out.is_dir():
            there = options.out / "evaluation.json"
            raise UserError(f"--out {options.out}: expected a file, got a folder; give --out {there}")
        check_writable(options.out.parent)


def show(
    options: Options, evaluation: Evaluation, *, more: Callable[[], None] = lambda: None, is_kept: bool = False
) -> None:
    """Writes the evaluation to `--out`, and prints it with `more` in its place, and the next command. What `is_kept`,
    the folder of the model has, too, where `upload` finds it."""
    from terakoya.atomic_files import write_text
    from terakoya.folder_kinds import kind_of

    text = json.dumps(evaluation.as_json(), indent=2, ensure_ascii=False)
    if options.out is not None:
        write_text(options.out, f"{text}\n")
    if options.as_json:
        typer.echo(text)
        return
    _show(evaluation, more)
    kind = kind_of(options.source)
    if kind == "Transformers model":
        carried = () if options.out is None or is_kept else ("--evaluation", options.out)
        next_command.show(*next_command.upload_words(options.source, *carried))
    elif kind == "run":
        next_command.after_training(options.source)
    else:
        next_command.show(*next_command.export_words(options.source))


def _show(evaluation: Evaluation, more: Callable[[], None]) -> None:
    """Prints the settings and the numbers of an evaluation."""
    from rich.text import Text

    shown = {name.replace("_", " "): value for name, value in evaluation.settings.items() if value is not None}
    settings = ", ".join(f"{translated(name)} {value}" for name, value in shown.items())
    measured = f": {translated(evaluation.measure)}" if evaluation.measure else ""
    console().print(Text(f"{evaluation.model}{measured}"), soft_wrap=True)
    if settings:
        console().print(settings, markup=False, soft_wrap=True, style="dim")
    if evaluation.results:
        console().print(table(evaluation))
    more()
    if evaluation.tasks:
        console().print(table(replace(evaluation, results=evaluation.tasks)))


def table(evaluation: Evaluation) -> Table:
    """A table with one row per data set or task."""
    from rich.table import Table
    from rich.text import Text

    names = dict.fromkeys(name for numbers in evaluation.results.values() for name in numbers if name not in IN_JSON)
    columns = [name for name in names if name not in COUNTS] + [name for name in names if name in COUNTS]
    grid = Table("data" if evaluation.measure else "task", box=None, header_style="bold", pad_edge=False)
    for name in columns:
        grid.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for data, numbers in evaluation.results.items():
        grid.add_row(Text(data), *(_cell(name, numbers.get(name)) for name in columns))
    return grid


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in COUNTS:
        return f"{value:,}"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"
