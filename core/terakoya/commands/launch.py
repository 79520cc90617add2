"""`terakoya launch`: shows what would start a run elsewhere, starts it if told to, and asks after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.commands import launch_jobs
from terakoya.commands.component_settings import gather, read_settings, take_flags
from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.launch.plan import PlannedLaunch


def command(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="LAUNCHER PARAMETERS.json [--SETTING VALUE...] | LAUNCHER status|stop|logs|fetch JOB",
            help="local, hosts, slurm, ...; the parameter JSON; and settings of the launcher. Or what to do with a "
            "submitted job: its name there, or the run's folder.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The run's folder, which all nodes see. Of fetch: a new folder.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Look at the hosts, too, and start nothing; --submit looks at them first.")
    ] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Start it, too.")] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Follow what was submitted to its end; status, logs too. Ctrl-C ends that alone."),
    ] = False,
    every: Annotated[float, typer.Option(min=0.2, help="With --watch: seconds between two looks.")] = 10.0,
    folder: Annotated[Path | None, typer.Option(help="Where the files go. Default: OUT.launch.")] = None,
    name: Annotated[str | None, typer.Option(help="The job's name. Default: that of the run's folder.")] = None,
    settings: Annotated[Path | None, typer.Option(help="A JSON or YAML file with the launcher's settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, over the parameters.")] = None,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="A parameter that may differ from the checkpoint's, as of train.")
    ] = None,
) -> None:
    """Print the exact files and commands that start a run on this machine, on hosts or a cluster; --submit runs them.

    `terakoya plugins show LAUNCHER` lists its settings: launch slurm bert.json --out run --time 24:00:00
    """
    from terakoya.launch.plan import plan_launch
    from terakoya.plugins import registry

    kind = arguments[0]
    launcher = registry().component("launchers", kind)
    if len(arguments) > 1 and arguments[1] in launch_jobs.VERBS:
        launch_jobs.ask(kind, arguments[1], arguments[2:], out=out, every=every if watch else None)
        return
    rest, flags = take_flags(arguments[1:], launcher.model_fields)
    if len(rest) != 1:
        raise UserError(f"launch {kind}: expected one parameter file, got {' '.join(rest) or 'none'}")
    if out is None:
        raise UserError(f"launch {kind}: expected --out RUN, the run's folder")
    if watch and not submit:
        raise UserError(f"--watch: nothing is submitted without --submit; later: launch {kind} status {out} --watch")
    file = read_settings(settings) if settings is not None else {}
    given = context.find_root().params
    global_options = [
        word for option in ("plugin", "without") for each in given[option] or () for word in (f"--{option}", each)
    ]
    planned = plan_launch(
        kind, Path(rest[0]), out, folder=folder, name=name, settings=gather(file, (), flags), overrides=set_ or (),
        allow_change=allow_change or (), global_options=global_options,
    )  # fmt: skip
    _show(kind, planned, submitted=submit)
    if check:
        planned.check()
    if not submit:
        return
    code = planned.submit()
    if code:
        raise typer.Exit(code)
    _tell(kind, planned, every=every if watch else None)


def _show(kind: str, planned: PlannedLaunch, *, submitted: bool) -> None:
    """Prints the plan."""
    from terakoya.log import console

    show = console()
    for file_name, text in planned.plan.files.items():
        show.print(f"--- {planned.folder / file_name}", markup=False, soft_wrap=True)
        show.print(text, markup=False, soft_wrap=True)
    for note in planned.plan.notes:
        show.print(note, markup=False, soft_wrap=True)
    show.print("started with:" if submitted else "start it with these, or the same command and --submit:")
    for line in planned.plan.commands:
        show.print(f"  {line}", markup=False, soft_wrap=True)
    goes_on = planned.launcher.jobs_go_on
    watching = f"launch {kind} status {planned.job.run}" if goes_on else f"status {planned.job.run}"
    show.print(f"watch it with:\n  terakoya {watching} --watch", markup=False, soft_wrap=True)


def _tell(kind: str, planned: PlannedLaunch, *, every: float | None) -> None:
    """Says which job it became, for launchers whose jobs go on by themselves, and follows it where `every` is given."""
    from terakoya.log import console
    from terakoya.toolkit.launchers.submitted import SubmittedJobRecord

    record = SubmittedJobRecord.read(planned.folder)
    if record is None or record.launcher != kind:
        return  # it has ended with the command
    named = planned.folder if planned.folder.name != f"{planned.job.run.name}.launch" else planned.job.run
    console().print(
        f"submitted as job {record.job}; ask after it with:\n  terakoya launch {kind} status|logs|stop {named}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    if every is not None:
        launch_jobs.ask(kind, "status", [str(planned.folder)], out=None, every=every)
