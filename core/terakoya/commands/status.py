"""`terakoya status`: the state of runs, read from their files alone."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError
from terakoya.log import console, format_duration, plural, translated, visible
from terakoya.places import as_written, is_local, open_views

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from terakoya.runs.status import RunStatus

COLOURS = {"training": "green", "finished": "green", "starting": "cyan", "stopped": "yellow", "not started": "yellow"}
"""Colours of the states that are not failures."""
SHOWN_WARNINGS = 3
RATES = (
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("samples_per_second", "{:,.1f} samples/s"),
    ("tflops", "{:,.3g} TFLOP/s a device"),
    ("mfu", "MFU {:.1%}"),
    ("gpu_memory", "GPU {:.1f} GB"),
    ("gpu_power", "{:.0f} W"),
    ("gpu_temperature", "{:.0f} °C"),
)


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(help="One or more run folders, or addresses such as s3://bucket/run.", metavar="RUN..."),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Update until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="With --watch: polling interval in seconds.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list with one object a run.")] = False,
) -> None:
    """Show the state of runs: step, loss, rate, remaining time, last validation and checkpoint, whether still alive."""
    if as_json and watch:
        raise UserError("--json prints the state once; leave out --watch")
    if as_json:
        typer.echo(visible(json.dumps([each.as_json() for each in read_all(runs)], indent=2, ensure_ascii=False)))
        return
    if not watch:
        console().print(render(read_all(runs)))
        if len(runs) == 1 and is_local(runs[0]):
            next_command.after_run(runs[0])
        else:
            next_command.show("report", *runs, "--out", "report.html")
        return
    try:
        if not console().is_terminal:
            while True:
                console().print(render(read_all(runs)))
                time.sleep(every)
        from rich.live import Live

        with Live(render(read_all(runs)), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(render(read_all(runs)), refresh=True)
    except KeyboardInterrupt:
        return


def read_all(runs: Sequence[Path]) -> list[RunStatus]:
    """Returns the states of `runs`, which are folders or other places."""
    from terakoya.runs import status

    with open_views(runs) as folders:
        read = [status.read(folder) for folder in folders]
    return [replace(each, folder=run) for each, run in zip(read, runs, strict=True)]


def render(statuses: Sequence[RunStatus]) -> Table | Group:
    """Returns one run as lines of facts, several as a table with their problems below it, as wide as the console."""
    from rich.console import Group

    if len(statuses) == 1:
        return details(statuses[0])
    notes = [
        f"{as_written(status.folder)}: {status.told}" for status in statuses if status.state in ("failed", "killed")
    ]
    notes += [f"{as_written(status.folder)}: {problem}" for status in statuses for problem in status.problems]
    shown = table(statuses, width=console().width)
    return Group(shown, *(_plain(note) for note in notes)) if notes else shown


def details(status: RunStatus) -> Table:
    """Returns the facts of one run, one a line."""
    from rich.table import Table

    from terakoya.training.screen import bits_per_character

    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")

    def add(name: str, text: str | None, style: str = "") -> None:
        if text:
            grid.add_row(translated(name), _plain(translated(text), style))

    grid.add_row(translated("run"), _plain(as_written(status.folder)))
    add("state", status.told, COLOURS.get(status.state, "bold red"))
    add("forked from", status.forked_from)
    add("step", _progress(status))
    add("phase", status.phase)
    add("loss", _loss(status))
    add("bits/character", _number(bits_per_character(status.values), "{:.4f}"))
    add("learning rate", _number(status.values.get("learning_rate"), "{:.3g}"))
    add("gradient norm", _number(status.values.get("grad_norm"), "{:.3g}"))
    add(
        "rate", "  ".join(translated(form).format(status.values[name]) for name, form in RATES if name in status.values)
    )
    add("remaining", _remaining(status))
    for check in status.validations:
        values = "  ".join(f"{translated(name)} {value:.4f}" for name, value in check.values.items())
        place = translated(f"step {check.step:,}") + (f"  {check.store}" if check.store else "")
        grid.add_row(translated("validation"), _plain(f"{place}: {values}"))
    if status.checkpoint:
        kept = f"{status.checkpoint.kept} kept" if status.checkpoint.kept > 1 else "the only one"
        age = translated(f"{format_duration(status.checkpoint.age)} ago")
        add("checkpoint", f"{status.checkpoint.name}, {age}; {translated(kept)}")
    elif status.checkpoints_gone:
        add("checkpoint", "gone: the run has saved some, and checkpoints/ holds none", "yellow")
    elif status.step:
        add("checkpoint", "none yet")
    if status.saving_step is not None:
        add("saving", f"step {status.saving_step:,} is being written")
    if status.seconds_since_word is not None:
        add("last record", f"{format_duration(status.seconds_since_word)} ago")
    add("restarts", f"{status.restarts}" if status.restarts else None)
    for name, number, last in (
        ("skipped steps", status.skipped_steps, status.last_skipped),
        ("spikes", status.spikes, status.last_spike),
        ("rollbacks", status.rollbacks, status.last_rollback),
    ):
        add(name, f"{number:,}, the last in {last}" if last else None, "yellow")
    for text in status.warnings[-SHOWN_WARNINGS:]:
        add("warning", text, "yellow")
    if len(status.warnings) > SHOWN_WARNINGS:
        earlier = len(status.warnings) - SHOWN_WARNINGS
        add("warning", f"and {earlier:,} earlier one{plural(earlier)}, in metrics.jsonl", "yellow")
    for text in status.problems:
        add("files", text, "yellow")
    return grid


DROPPED = ("restarts", "change", "tokens/s", "checkpoint", "bits/character", "validation loss", "remaining", "loss")
"""The columns of several runs that a narrow terminal does without, in this order."""


def table(statuses: Sequence[RunStatus], *, width: int) -> Table:
    """Returns a table of several runs, one a row, of at most `width` columns: what is too wide is left out, a column at
    a time. Run, state and step always stay; the path of a run gets shorter before a column goes."""
    from rich.cells import cell_len
    from rich.table import Table

    from terakoya.folder_kinds import distinct_names
    from terakoya.training.screen import bits_per_character

    cells: dict[str, list[str]] = {"run": [as_written(status.folder) for status in statuses]}
    cells["state"] = [translated(status.state) for status in statuses]
    cells["step"] = [_progress(status) or "" for status in statuses]
    cells["loss"] = [_number(status.loss, "{:.4f}") or "" for status in statuses]
    cells["change"] = [_number(status.loss_change, "{:+.4f}") or "" for status in statuses]
    cells["tokens/s"] = [_number(status.values.get("tokens_per_second"), "{:,.0f}") or "" for status in statuses]
    cells["remaining"] = [
        "" if status.seconds_left is None else format_duration(status.seconds_left) for status in statuses
    ]
    cells["validation loss"] = [
        "  ".join(f"{check.values['loss']:.4f}" for check in status.validations if "loss" in check.values)
        for status in statuses
    ]
    bits = [[bits_per_character(check.values) for check in status.validations] for status in statuses]
    if any(number is not None for numbers in bits for number in numbers):
        cells["bits/character"] = ["  ".join(_number(each, "{:.4f}") or "-" for each in numbers) for numbers in bits]
    cells["checkpoint"] = [
        f"{saved.step:,}, {translated(f'{format_duration(saved.age)} ago')}" if (saved := status.checkpoint) else ""
        for status in statuses
    ]
    cells["restarts"] = [str(status.restarts or "") for status in statuses]

    def total() -> int:
        columns = ([translated(name), *map(visible, texts)] for name, texts in cells.items())
        return sum(max(map(cell_len, texts)) for texts in columns) + 2 * (len(cells) - 1)

    if total() > width:
        cells["run"] = list(distinct_names([status.folder for status in statuses]))
    for name in DROPPED:
        if total() > width:
            cells.pop(name, None)
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for name in cells:
        grid.add_column(translated(name), no_wrap=True, overflow="ignore")
    for row, status in enumerate(statuses):
        colours = {"state": COLOURS.get(status.state, "bold red")}
        grid.add_row(*(_plain(texts[row], colours.get(name, "")) for name, texts in cells.items()))
    return grid


def _progress(status: RunStatus) -> str | None:
    if not status.step and status.max_steps is None and status.max_tokens is None:
        return None
    share = "" if status.share_done is None else f" ({status.share_done:.1%})"
    if status.max_tokens:
        return f"{status.step:,}, {status.tokens:,}/{status.max_tokens:,} tokens{share}"
    of = "" if status.max_steps is None else f"/{status.max_steps:,}"
    return f"{status.step:,}{of}{share}"


def _loss(status: RunStatus) -> str | None:
    if status.loss is None:
        return None
    if status.loss_change is None:
        return f"{status.loss:.4f}"
    steps = status.loss_change_steps or 0
    return f"{status.loss:.4f}, {status.loss_change:+.4f} in {steps:,} step{plural(steps)}"


def _remaining(status: RunStatus) -> str | None:
    limit = status.seconds_to_limit
    remaining = None if status.seconds_left is None else format_duration(status.seconds_left)
    if limit is None or (status.seconds_left is not None and status.seconds_left <= limit):
        return remaining
    return f"{remaining or 'not known yet'}; max_minutes stops it in {format_duration(limit)}"


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _plain(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(visible(text), style=style)
