"""Plans a run: from parameters to the files and commands that start it, and starts it on request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.components import Job, Launcher, LaunchPlan
from terakoya.config import batch_table
from terakoya.config.parameters import Parameters, check_allowed_changes
from terakoya.config.presets import find_parameters
from terakoya.errors import UserError
from terakoya.json_settings import refuse_secrets
from terakoya.places import check_local, is_local, place_of
from terakoya.plugins import registry
from terakoya.plugins.create import create_component
from terakoya.runs.folder import check_place
from terakoya_launch.jobs import find_plan_folder
from terakoya_launch.options import LaunchOptions

NO_OPTIONS = LaunchOptions()


@dataclass(frozen=True)
class PlannedLaunch:
    """A plan, and the folder with its files."""

    launcher: Launcher
    job: Job
    plan: LaunchPlan
    folder: Path

    def check(self) -> None:
        """Checks the machines where the job will run and starts nothing; see `Launcher.check`."""
        self.launcher.check(self.job, self.folder)

    def submit(self) -> int:
        return self.launcher.submit(self.job, self.plan, self.folder)


def plan_launch(
    launcher: str,
    parameters: Path,
    out: Path,
    options: LaunchOptions = NO_OPTIONS,
    *,
    settings: Mapping[str, Any] | None = None,
    write: bool = True,
) -> PlannedLaunch:
    """Plans how `launcher` with these `settings` starts the run of `parameters` into `out`, a folder or a place such as
    s3://bucket/run, and writes the plan's files; with `write` false it only looks for errors.

    Raises:
        UserError: an unknown launcher, wrong settings, a secret in them, wrong parameters: every error that can be
            found before the job waits for hours in a queue.
    """
    refuse_secrets(settings or {}, f"launch {launcher}")
    component: Launcher = create_component("launchers", launcher, settings or {}, where=f"launch {launcher}")
    if options.work_folder is not None and component.places_run:
        raise UserError(f"launch {launcher}: --work-folder: its settings say where the run trains; leave it out")
    job = make_job(parameters, out, options, settings_nodes=component.nodes())
    folder = options.folder or find_plan_folder(out)
    check_local(folder, "the folder for the plan's files")
    folder = folder.absolute()
    plan = component.plan(job, folder)
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in plan.files.items():
            (folder / file).write_text(text, encoding="utf-8")
    return PlannedLaunch(component, job, plan, folder)


def make_job(
    parameters: Path, out: Path, options: LaunchOptions = NO_OPTIONS, *, settings_nodes: int | None = None
) -> Job:
    """Returns the job that trains `parameters` into `out`. `settings_nodes` is the number of nodes that the launcher's
    settings name.

    Raises:
        UserError: the parameters or the name are wrong.
    """
    overrides, name = options.overrides or (), options.name
    place = place_of(out)
    run = place.work_folder(options.work_folder)
    check_place(run)
    short = Parameters.load(parameters, overrides, nodes="any").batch_size.keys() == {batch_table.EACH_NODE}
    nodes = options.nodes or (settings_nodes if short else None)
    loaded = Parameters.load(parameters, overrides, nodes=nodes)
    check_allowed_changes(options.allow_change, loaded, registry())
    run = run.absolute()
    if name is None:
        name = (
            re.sub(r"[^A-Za-z0-9]+", "-", Path(run if place.is_local else place.name).name).strip("-")[:63]
            or "terakoya"
        )
    elif not re.fullmatch(r"[A-Za-z0-9](-*[A-Za-z0-9]){0,62}", name):
        raise UserError(f'--name: expected up to 63 letters, digits and hyphens between them, got "{name}"')
    sets = [word for override in overrides for word in ("--set", override)]
    allowed = [word for key in options.allow_change for word in ("--allow-change", key)]
    arguments = (
        *options.global_options,
        "train",
        str(find_parameters(parameters).absolute()),
        "--out",
        *((str(run),) if place.is_local else (place.name, "--work-folder", str(run))),
        *sets,
        *allowed,
        *(() if nodes is None else ("--nodes", str(nodes))),
    )
    data = loaded.data
    mixtures = (data.train, *(stage.train for stage in data.stages), *(each.train for each in loaded.all_data))
    stores = [entry.store for mixture in mixtures for entry in mixture]
    return Job(
        name, arguments, Path.cwd(), run, dict(loaded.batch_size), loaded.parallel.timeout_seconds, loaded.on_lost_node,
        data_folders=tuple(
            dict.fromkeys(path.absolute() for path in (*stores, *data.validation) if is_local(path))
        ),
        kept_in=None if place.is_local else place.name,
    )  # fmt: skip
