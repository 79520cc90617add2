"""Training in this process: `terakoya.train`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya.folder_kinds import address_of, is_address, refuse_address

if TYPE_CHECKING:
    from terakoya.config.parameters import Parameters
    from terakoya.training.trainer import TrainResult


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Pauses the garbage collector, which would look through all modules again and again while they are imported: that
    is some tenths of a second of torch's and Transformers' imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def train(
    parameters: Path | str | Mapping[str, Any] | Parameters,
    out: Path | str,
    *,
    events: Mapping[str, Callable[..., Any]] | None = None,
    overrides: Sequence[str] = (),
    allow_change: Sequence[str] = (),
    start_over: bool = False,
    work_folder: Path | str | None = None,
) -> TrainResult:
    """Trains into the folder `out`, resuming from its last checkpoint; for notebooks and other programs.

    `parameters` is a file, the name of a preset such as "bert_base", or the content of a parameter file; for a
    `batch_size` of `{"*": ROWS}`, `Parameters.load(file, nodes=2)`. `events` are functions by event, such as
    `{"step_finished": f}` for `f(run, report)`; `terakoya.hookspecs` describes the events. A function that raises an
    exception ends the run.

    Where `out` is an address such as "s3://bucket/run", the run trains in `work_folder`, by default a folder of the
    user's cache, is mirrored to the address, and continues from there on another machine.

    With `start_over` the run may begin at step 0 although it has had checkpoints, of which none is whole.

    Trains in this process, which may be one of several that a launcher started. To start several processes on this
    machine use the command line or `terakoya.launch.local.run_processes`.

    Raises:
        UserError: an error that the user can fix.
    """
    folder, address = resolve_out(out, work_folder)
    with imports():
        from terakoya.config.parameters import Parameters
        from terakoya.estimation.model_errors import explain_model_errors
        from terakoya.plugins import listening
        from terakoya.training.setup import StartOptions, train_in_this_process

    with listening(events or {}):
        if isinstance(parameters, Path | str):
            parameters = Parameters.load(Path(parameters), overrides)
        elif overrides or not isinstance(parameters, Parameters):
            raw = parameters.dump() if isinstance(parameters, Parameters) else parameters
            parameters = Parameters.from_dict(raw, source="parameters", overrides=overrides)
        options = StartOptions(
            allow_change=frozenset(allow_change), start_over=start_over, advice=explain_model_errors, mirror_to=address
        )
        return train_in_this_process(parameters, folder, options)


def resolve_out(out: Path | str, work_folder: Path | str | None) -> tuple[Path, str | None]:
    """Returns the folder in which a run with this `--out` and `--work-folder` trains, and the address that it is
    mirrored to; None where `out` is a folder.

    Raises:
        UserError: a work folder is given for a folder, or is an address.
    """
    if not is_address(out):
        if work_folder is not None:
            raise UserError(
                f"--work-folder {work_folder}: expected an address such as s3://bucket/run in --out, got {out}, a "
                "folder; leave out --work-folder"
            )
        return Path(out), None
    if work_folder is not None:
        refuse_address(work_folder, "a work folder of this machine")
    from terakoya.runs.mirrored import work_folder_of

    return Path(work_folder) if work_folder is not None else work_folder_of(out), address_of(out)
