"""`terakoya launch`: prints the plan that starts a run elsewhere, submits it, and manages submitted jobs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.commands.component_settings import gather, take_flags
from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import NodesOption, ParametersSet, plugin_options
from terakoya.errors import UserError
from terakoya_launch.commands import jobs

if TYPE_CHECKING:
    from terakoya_launch.plan import PlannedLaunch


WorkFolderOption = Annotated[
    Path | None,
    typer.Option(help="With an address in --out: the run's folder on the nodes. Default: in the user's cache."),
]
FolderOption = Annotated[Path | None, typer.Option(help="The folder for the files. Default: OUT.launch.")]
SettingsOption = Annotated[Path | None, typer.Option(help="A JSON or YAML file with the launcher's settings.")]
AllowChangeOption = Annotated[
    list[str] | None, typer.Option(help="A parameter that may differ from the checkpoint's, as with train.")
]


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
    work_folder: WorkFolderOption = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Also check the hosts, and start nothing; hosts --submit checks them first."),
    ] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Also start the run.")] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Follow the submitted job to its end; also with status and logs. Ctrl-C ends only this."
        ),
    ] = False,
    every: Annotated[float, typer.Option(min=0.2, help="With --watch: polling interval in seconds.")] = 10.0,
    folder: FolderOption = None,
    nodes: NodesOption = None,
    name: Annotated[str | None, typer.Option(help="The job's name. Default: the name of the run's folder.")] = None,
    settings: SettingsOption = None,
    set_: ParametersSet = None,
    allow_change: AllowChangeOption = None,
) -> None:
    """Print the exact files and commands that start a run on this machine, on hosts or a cluster; --submit runs them.

    `terakoya plugins show LAUNCHER` lists its settings: launch slurm bert.json --out run --time 24:00:00
    """
    from terakoya.json_settings import read_settings
    from terakoya.plugins import registry
    from terakoya_launch.plan import LaunchOptions, plan_launch

    launcher = arguments[0]
    component = registry().component("launchers", launcher)
    if len(arguments) > 1 and arguments[1] in jobs.VERBS:
        jobs.run_verb(launcher, arguments[1], arguments[2:], out=out, every=every if watch else None)
        return
    rest, flags = take_flags(arguments[1:], component.model_fields, verb="launch")
    if len(rest) != 1:
        raise UserError(f"launch {launcher}: expected one parameter file, got {' '.join(rest) or 'none'}")
    if out is None:
        raise UserError(f"launch {launcher}: expected --out RUN, the run's folder")
    if watch and not submit:
        raise UserError(f"--watch needs --submit; to follow a job later: launch {launcher} status {out} --watch")
    file = read_settings(settings) if settings is not None else {}
    given = context.find_root().params
    options = LaunchOptions(
        work_folder=work_folder, folder=folder, nodes=nodes, name=name, overrides=set_ or (),
        allow_change=allow_change or (),
        global_options=[word for pair in plugin_options(given["plugin"], given["without"]) for word in pair],
    )  # fmt: skip
    planned = plan_launch(launcher, Path(rest[0]), out, options, settings=gather(file, (), flags))
    show(launcher, planned, submitted=submit)
    if check:
        planned.check()
    if not submit:
        next_command.show(*(word for word in context.find_root().meta["arguments"] if word != "--check"), "--submit")
        return
    code = planned.submit()
    if code:
        raise typer.Exit(code)
    report_job(launcher, planned, every=every if watch else None)


def show(launcher: str, planned: PlannedLaunch, *, submitted: bool) -> None:
    """Prints the plan; its files and commands as they are."""
    from rich.text import Text

    from terakoya.log import console

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
    from terakoya.log import console
    from terakoya_launch.jobs import find_plan_folder
    from terakoya_launch.submitted import SubmittedJobRecord

    record = SubmittedJobRecord.read(planned.folder)
    if record is None or record.launcher != launcher:  # the run has ended with the command
        if planned.job.address is not None:
            next_command.show("status", planned.job.address)
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
