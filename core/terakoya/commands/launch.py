"""`terakoya launch`: shows what would start a run elsewhere, and starts it if told to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.component_settings import gather, read_settings, take_flags
from terakoya.errors import UserError


def command(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="LAUNCHER PARAMETERS.json [--SETTING VALUE...]",
            help="local, hosts, slurm, ...; the parameter JSON; and settings of the launcher.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The run's folder, which all nodes see.")],
    submit: Annotated[bool, typer.Option("--submit", help="Start it, too.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where the files go. Default: OUT.launch.")] = None,
    name: Annotated[str | None, typer.Option(help="The job's name. Default: that of the run's folder.")] = None,
    settings: Annotated[Path | None, typer.Option(help="A JSON or YAML file with the launcher's settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, over the parameters.")] = None,
) -> None:
    """Print the exact files and commands that start a run on this machine, on hosts or a cluster; --submit runs them.

    `terakoya plugins show LAUNCHER` lists its settings: launch slurm bert.json --out run --time 24:00:00
    """
    from terakoya.launch import launch
    from terakoya.log import console
    from terakoya.plugins import registry

    launchers = registry()
    kind = arguments[0]
    rest, flags = take_flags(arguments[1:], launchers.component("launchers", kind).model_fields)
    if len(rest) != 1:
        raise UserError(f"launch {kind}: expected one parameter file, got {' '.join(rest) or 'none'}")
    file = read_settings(settings) if settings is not None else {}
    given = context.find_root().params
    before = [
        word for option in ("plugin", "without") for each in given[option] or () for word in (f"--{option}", each)
    ]
    planned = launch(
        kind, Path(rest[0]), out, folder=folder, name=name, settings=gather(file, (), flags), overrides=set_ or (),
        before=before,
    )  # fmt: skip
    show = console()
    for file_name, text in planned.plan.files.items():
        show.print(f"--- {planned.folder / file_name}", markup=False, soft_wrap=True)
        show.print(text, markup=False, soft_wrap=True)
    for note in planned.plan.notes:
        show.print(note, markup=False, soft_wrap=True)
    show.print("started with:" if submit else "start it with these, or the same command and --submit:")
    for line in planned.plan.commands:
        show.print(f"  {line}", markup=False, soft_wrap=True)
    show.print(f"watch it with:\n  terakoya status {planned.job.run} --watch", markup=False, soft_wrap=True)
    if submit:
        code = planned.submit()
        if code:
            raise typer.Exit(code)
