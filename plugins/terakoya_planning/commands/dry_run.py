"""`terakoya train --dry-run`: everything that could stop a run is tried, and its time is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from terakoya.config.parameters import Parameters
    from terakoya.training.start.meeting import StartOptions
    from terakoya_planning.dry_run import DrySteps


def train(
    verb: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check data, processes, batch size and disk, time a few steps, write nothing."),
    ] = False,
) -> None:
    """Tries the run instead of training it, if that is asked for."""
    if dry_run:
        words = [word for word in arguments["context"].meta["arguments"] if word != "--dry-run"]
        arguments = {**arguments, "options": replace(arguments["options"], instead=partial(_try, words=words))}
    verb(**arguments)


def _try(parameters: Parameters, folder: Path, start: StartOptions, *, words: Sequence[str]) -> None:
    from terakoya.commands.guidance import next_command
    from terakoya.distributed.topology import LaunchInfo
    from terakoya_planning.dry_run import dry_run

    steps = dry_run(parameters, folder, start)
    if LaunchInfo.from_environment(node_rank=start.node_rank).rank == 0:
        _say_time(steps, folder)
        next_command.show(*words)


def _say_time(steps: DrySteps, folder: Path) -> None:
    """Says how long the run takes: as its own steps until now say where there are some, or else those of the dry run,
    which are kept for `terakoya estimate`."""
    from terakoya.log import error_console, translated
    from terakoya_planning.kept_rates import KeptRates, machine_facts, rate_facts, seconds_of_run
    from terakoya_planning.probe import Probed
    from terakoya_planning.speed import describe_hours

    hours, source = steps.hours, "at the speed of the steps just taken"
    seconds = seconds_of_run(folder, steps.parameters, processes=steps.processes)
    if seconds is not None:
        hours, source = seconds * steps.steps / 3600, f"at the speed of the run in {folder} until now"
    time = translated(describe_hours((hours, hours)))
    error_console().print(f"time: {time} for all {steps.steps:,} steps, {translated(source)}", soft_wrap=True)
    run = rate_facts(
        steps.parameters.at_start, vocab_size=steps.vocab_size, rows=steps.share.micro_batch_size,
        processes=steps.processes,
    )  # fmt: skip
    KeptRates().keep(machine_facts(steps.processes), run, Probed(steps.rate, "a dry run of it"))
