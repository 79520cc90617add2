"""`terakoya average`: the mean of the weights of several models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command


def command(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="Runs, RUN@STEP, checkpoints, or Transformers folders.")
    ],
    out: Annotated[Path, typer.Option(help="The new Transformers folder.")],
    weights: Annotated[
        str | None, typer.Option(metavar="W,W,...", help="How much each model counts; by default all alike.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Of each MODEL, a run then, the K newest checkpoints.")
    ] = None,
) -> None:
    """Average the weights of models of one architecture and vocabulary (a "soup") into a new Transformers folder.

    Other programs call this merging. Here `store merge` joins token stores, so this has a name of its own. Weights are
    added up in float64, one tensor at a time.
    """
    from terakoya.errors import UserError
    from terakoya.log import announce, console

    announce("terakoya average: loads PyTorch and Transformers ...")
    from terakoya_forks.average import average

    try:
        numbers = None if weights is None else [float(each) for each in weights.split(",")]
    except ValueError:
        raise UserError(f"--weights: expected numbers with commas between them, got {weights}") from None
    for each in average(models, out, weights=numbers, last=last):
        step = "" if each.step is None else f" (step {each.step:,})"
        console().print(f"weight {each.share:.4f}: {each.folder}{step}", markup=False, soft_wrap=True)
    console().print(f"averaged to {out}", markup=False, soft_wrap=True)
    next_command.after_model(out)
