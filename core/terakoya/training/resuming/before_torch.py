"""Refuses a start for what parameters, manifests and stores tell: before torch is loaded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from terakoya.config.parameters import Parameters, check_allowed_changes
from terakoya.errors import TemporaryFailure, UserError
from terakoya.log import error_console, translated
from terakoya.plugins import registry
from terakoya.plugins.run_record import check_plugins
from terakoya.rows.stores import Stores
from terakoya.runs.checkpoints import DamagedError, list_checkpoints, read_manifest
from terakoya.runs.folder import check_place
from terakoya.training.resuming.changes import (
    check_global_batch,
    check_vocabulary,
    consent_of_fork,
    may_read_others,
    refuse_changes,
)


def check_start(run: Path, parameters: Parameters, allow_change: frozenset[str]) -> None:
    """Raises UserError where a run in the folder `run` would refuse these `parameters` when all is loaded.

    The files of checkpoints are not read, and a damaged one makes way for the one before: what counts is what none of
    them takes.
    """
    check_place(run)
    check_allowed_changes(allow_change, parameters, registry())
    refused: list[UserError] = []
    lines: list[str] = []
    checkpoints: list[tuple[int, Path]] = []
    with suppress(TemporaryFailure):  # of which more is said when the run is opened
        checkpoints = list_checkpoints(run / "checkpoints")
    for _, folder in reversed(checkpoints):
        try:
            _check_resume(run, folder, parameters, allow_change, [] if refused else lines)
        except (DamagedError, TemporaryFailure):
            continue
        except UserError as error:
            refused.append(error)
        else:
            break
    else:
        if refused:
            for line in lines:
                error_console().print(translated(line), markup=False, soft_wrap=True)
            raise refused[0]


def _check_resume(
    run: Path, folder: Path, parameters: Parameters, allow_change: frozenset[str], lines: list[str]
) -> None:
    """Raises UserError where the run does not continue from its checkpoint `folder` with these `parameters`; `lines`
    receives every parameter that has changed."""
    manifest = read_manifest(folder)
    parameters = parameters.with_precision(manifest["parameters"]["precision"])
    if (fork := consent_of_fork(run, folder)) is not None:
        allow_change |= frozenset(fork.changed)
    fingerprints = manifest["stores"]
    if may_read_others(manifest, parameters):
        try:
            stores = Stores.of_run(parameters)
        except UserError:  # of which is said more where all else may stay
            allow_change |= {"data"}
        else:
            check_vocabulary(folder, stores)
            fingerprints = stores.fingerprints()
    refuse_changes(run, manifest, parameters, fingerprints, allow_change, lines.append)
    if missing := check_plugins(registry(), manifest["plugins"], parameters.dump()).missing:
        raise UserError(f"{folder}: " + "; ".join(missing))
    check_global_batch(folder, manifest, parameters)
