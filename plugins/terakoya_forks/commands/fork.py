"""`terakoya fork`: a new run that begins at a checkpoint of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import ParametersSet


def command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN[@STEP]", help="A run, for its newest checkpoint; RUN@STEP; or the folder of a checkpoint."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new run's folder.")],
    set_: ParametersSet = None,
) -> None:
    """Begin a new run at a checkpoint of another one, with its weights, optimizer state and place in the data.

    With nothing changed it takes the same steps as its parent. --set changes parameters from there on: a schedule that
    decays, the learning rate, the mixture, the length. The checkpoint is linked, not copied, and stays when the parent
    removes its own.
    """
    from terakoya.launch.here import imports
    from terakoya.log import announce, console

    announce(f"terakoya fork: reads {run} ...")
    with imports():
        from terakoya_forks.fork import fork

    made = fork(run, out, set_ or ())
    console().print(f"forked {made.describe()} to {out}", markup=False, soft_wrap=True)
    for key in made.changed:
        console().print(f"changed from here on: {key}", markup=False, soft_wrap=True)
    parameters = out / "parameters.json"
    next_command.show(*(next_command.train_words(out) or ("train", parameters, "--out", out)))
