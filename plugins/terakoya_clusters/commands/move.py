"""`terakoya move`: stops a run, carries it, and starts it again elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.component_settings import take_flags
from terakoya.commands.guidance import next_command
from terakoya.errors import UserError
from terakoya_launch.commands import launch
from terakoya_launch.options import LaunchOptions


def command(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN LAUNCHER[:VALUE] [--SETTING VALUE...]",
            help="The run's folder or address; local, hosts:a01:4,a02:4, slurm:PARTITION, pbs:QUEUE, grid_engine:QUEUE "
            "or sagemaker; and settings of the launcher.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where the run goes on: a new folder, or an address: s3://bucket/run. Default: where it is."),
    ] = None,
    lost: Annotated[
        bool, typer.Option("--lost", help="The machine that trained is gone: stop nothing, go on from what is there.")
    ] = False,
    *,
    options: LaunchOptions,
) -> None:
    """Stop a run, carry it, and start it again on other machines: the curve goes on bit for bit.

    Nothing is stopped before the new start is planned. Where a step fails, the same command goes on from there.
    """
    from terakoya.log import console
    from terakoya.plugins import registry
    from terakoya_clusters.move import move, saying_where

    if len(arguments) < 2:
        raise UserError(
            "move: expected a run and a launcher, such as: terakoya move work/run slurm:gpu --time 24:00:00"
        )
    run, (launcher, colon, value) = Path(arguments[0]), arguments[1].partition(":")
    component = registry().component("launchers", launcher)
    rest, flags = take_flags(arguments[2:], component.model_fields, verb="move")
    if rest:
        raise UserError(f"move: expected settings of {launcher} after it, got {' '.join(rest)}")
    if colon and component.main_setting is None:
        raise UserError(f"move: {launcher}: takes no value after a colon, got {value}; give its settings as options")
    if colon:
        flags = {str(component.main_setting): value, **flags}

    def say(text: str) -> None:
        console().print(text, markup=False, soft_wrap=True)

    settings, options = launch.gather_settings(options, flags), launch.as_loaded(options, context)
    planned = move(run, launcher, settings, out=out, lost=lost, say=say, options=options)
    launch.show(launcher, planned, submitted=True)
    with saying_where(Path(planned.job.out), say):
        code = planned.submit()
    if code:
        next_command.show(*context.find_root().meta["arguments"])
        raise typer.Exit(code)
    launch.report_job(launcher, planned, every=None)
