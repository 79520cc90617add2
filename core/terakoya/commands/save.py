"""`terakoya save`: requests a checkpoint from a run that trains, from another terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError
from terakoya.log import console


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a run that trains now.", metavar="RUN")],
    wait: Annotated[bool, typer.Option(help="Wait until the checkpoint is there.")] = True,
) -> None:
    """Save a checkpoint of a running training now: after the step under way, on all its processes.

    Training continues. The checkpoint is one of those that `checkpoint.keep` counts.
    """
    from terakoya.atomic_files import write_text
    from terakoya.components.run import SAVE_REQUEST
    from terakoya.runs import files

    def newest() -> tuple[float, str] | None:
        saved = files.find_checkpoints(run)
        return max(((each.time, each.folder.name) for each in saved), default=None)

    _refuse_unless_training(run)
    before = newest()
    write_text(run / SAVE_REQUEST, "terakoya save\n")
    if not wait:
        console().print(f"requested: {run} saves after one of its next steps", markup=False, soft_wrap=True)
        next_command.show("status", run)
        return
    while (after := newest()) == before or (run / SAVE_REQUEST).exists():
        if not files.read_lock(run).held:
            (run / SAVE_REQUEST).unlink(missing_ok=True)
            raise UserError(f"{run}: the run ended before it saved; `terakoya status {run}` tells why")
        time.sleep(0.2)
    assert after is not None
    saved = run / "checkpoints" / after[1]
    console().print(f"saved {saved}", markup=False, soft_wrap=True)
    next_command.show(*next_command.export_words(saved))


def _refuse_unless_training(run: Path) -> None:
    """Raises UserError unless a process trains in `run` and listens to requests."""
    from terakoya.folder_kinds import describe_found, kind_of
    from terakoya.runs import files

    if kind_of(run) != "run" and not (run / "run.lock").is_file():
        raise UserError(f"{run}: expected the folder of a run, got {describe_found(run, 'run')}")
    if not files.read_lock(run).held:
        saved = files.find_checkpoints(run)
        last = f"its last checkpoint is {saved[-1].folder.name}" if saved else "it has no checkpoint"
        raise UserError(f"{run}: no process trains here, so there is nothing new to save; {last}")
    events = files.read_parameters(run).get("events", {})
    if "save_on_demand" in events and events["save_on_demand"] is None:
        raise UserError(f'{run}: its parameters switch requests off ("events": {{"save_on_demand": null}})')
