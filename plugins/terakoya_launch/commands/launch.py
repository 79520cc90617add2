"""`terakoya launch`: prints the plan that starts a run elsewhere, submits it, and manages submitted jobs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.commands.component_settings import gather, take_flags
from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import plugin_options
from terakoya.errors import UserError
from terakoya.log import console
from terakoya_launch.commands import jobs
from terakoya_launch.options import LaunchOptions

if TYPE_CHECKING:
    from terakoya_launch.plan import PlannedLaunch


@dataclass(frozen=True, kw_only=True)
class Then:
    """What `launch` does after it has planned."""

    check: Annotated[
        bool, typer.Option("--check", help="Also check the hosts, and start nothing; hosts --submit checks them first.")
    ] = False
    submit: Annotated[bool, typer.Option("--submit", help="Also start the run.")] = False
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Follow the submitted job to its end; also with status and logs. Ctrl-C ends only this."
        ),
    ] = False
    every: Annotated[float, typer.Option(min=0.2, help="With --watch: polling interval in seconds.")] = 10.0


def command(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="LAUNCHER PARAMETERS.json [--SETTING VALUE...] | LAUNCHER status|stop|logs|fetch JOB",
            help="local, hosts, slurm, ...; the parameter JSON; and settings of the launcher. Or a command for a "
            "submitted job, given by its identifier or by the run's folder.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder, visible on all nodes, or an address: s3://bucket/run. With fetch: a new folder."
        ),
    ] = None,
    *,
    options: LaunchOptions,
    then: Then,
) -> None:
    """Print the exact files and commands that start a run on this machine, on hosts or a cluster; --submit runs them.

    `terakoya plugins show LAUNCHER` lists its settings: launch slurm bert.json --out run --time 24:00:00
    --gpus 8 --processes 8
    """
    from terakoya.plugins import registry
    from terakoya_launch.plan import plan_launch

    launcher, every = arguments[0], then.every if then.watch else None
    component = registry().component("launchers", launcher)
    if len(arguments) > 1 and arguments[1] in jobs.VERBS:
        jobs.run_verb(launcher, arguments[1], arguments[2:], out=out, every=every)
        return
    rest, flags = take_flags(arguments[1:], component.model_fields, verb="launch")
    if len(rest) != 1:
        raise UserError(f"launch {launcher}: expected one parameter file, got {' '.join(rest) or 'none'}")
    if out is None:
        raise UserError(f"launch {launcher}: expected --out RUN, the run's folder")
    if then.watch and not then.submit:
        raise UserError(f"--watch needs --submit; to follow a job later: launch {launcher} status {out} --watch")
    planned = plan_launch(
        launcher, Path(rest[0]), out, as_loaded(options, context), settings=gather_settings(options, flags)
    )
    show(launcher, planned, submitted=then.submit)
    if then.check:
        planned.check()
    if not then.submit:
        next_command.show(*(word for word in context.find_root().meta["arguments"] if word != "--check"), "--submit")
        return
    code = planned.submit()
    if code:
        raise typer.Exit(code)
    report_job(launcher, planned, every=every)


def gather_settings(options: LaunchOptions, flags: Mapping[str, str]) -> dict[str, Any]:
    """Returns the launcher's settings: those of the file, and those that are `flags` of the command line."""
    from terakoya.json_settings import read_settings

    return gather(read_settings(options.settings_file) if options.settings_file is not None else {}, (), flags)


def as_loaded(options: LaunchOptions, context: typer.Context) -> LaunchOptions:
    """Returns `options` with those of `terakoya` itself that loaded the plugins of this command."""
    given = context.find_root().params
    words = [word for pair in plugin_options(given["plugin"], given["without"]) for word in pair]
    return replace(options, global_options=words)


def show(launcher: str, planned: PlannedLaunch, *, submitted: bool) -> None:
    """Prints the plan; its files and commands as they are."""
    from rich.text import Text

    output = console()
    for file_name, text in planned.plan.files.items():
        output.print(f"--- {planned.folder / file_name}", markup=False, soft_wrap=True)
        output.print(Text(text), soft_wrap=True)
    for note in planned.plan.notes:
        output.print(note, markup=False, soft_wrap=True)
    output.print("started with:" if submitted else "start it with these commands, or add --submit to yours:")
    for line in planned.plan.commands:
        output.print(Text(f"  {line}"), soft_wrap=True)
    detached = planned.launcher.detached
    run = shlex.quote(planned.job.out)
    watching = f"launch {launcher} status {run}" if detached else f"status {run}"
    output.print(f"follow it with:\n  terakoya {watching} --watch", markup=False, soft_wrap=True)


def report_job(launcher: str, planned: PlannedLaunch, *, every: float | None) -> None:
    """Prints the job of a launcher with detached jobs, and follows it if `every` is given."""
    from terakoya.folder_kinds import kind_of
    from terakoya_launch.jobs import find_plan_folder
    from terakoya_launch.submitted import SubmittedJobRecord

    record = SubmittedJobRecord.read(planned.folder)
    if record is None or record.launcher != launcher:  # the run has ended with the command
        if planned.job.kept_in is not None:
            next_command.show("status", planned.job.kept_in)
        elif kind_of(planned.job.run) == "run":
            next_command.after_run(planned.job.run)
        return
    is_default = planned.folder == find_plan_folder(Path(planned.job.out))
    folder = planned.job.out if is_default else str(planned.folder)
    console().print(
        f"submitted as job {record.job}; manage it with:\n  terakoya launch {launcher} status|logs|stop "
        + shlex.quote(folder),
        markup=False, soft_wrap=True,
    )  # fmt: skip
    if every is not None:
        jobs.run_verb(launcher, "status", [str(planned.folder)], out=None, every=every)
    else:
        next_command.show("launch", launcher, "status", folder, "--watch")
