"""Training in this process: `terakoya.train`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.places import place_of

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
    overrides: Sequence[str] | str = (),
    allow_change: Sequence[str] | str = (),
    start_over: bool = False,
    work_folder: Path | str | None = None,
) -> TrainResult:
    """Trains into the folder `out`, resuming from its last checkpoint; for notebooks and other programs. Raises
    UserError for what the user can fix.

    `parameters` is a file, the name of a preset such as "bert_base", or the content of a parameter file; for a
    `batch_size` of `{"*": ROWS}`, `Parameters.load(file, nodes=2)`. `events` are functions by event, such as
    `{"step_finished": f}` for `f(run, report)`; `terakoya.hookspecs` describes the events. A function that raises an
    exception ends the run.

    Where `out` is a place such as "s3://bucket/run", the run trains in `work_folder`, by default a folder of the user's
    cache, is copied there while it trains, and continues from there on another machine.

    With `start_over` the run may begin at step 0 although it has had checkpoints, of which none is whole.

    Trains in this process, which may be one of several that a launcher started. To start several processes on this
    machine use the command line or `terakoya.launch.local.run_processes`.
    """
    place = place_of(out)
    folder = place.work_folder(work_folder)
    with imports():
        from terakoya.checking.model_errors import explain_model_errors
        from terakoya.config.parameters import Parameters
        from terakoya.plugins import listening
        from terakoya.training.setup import StartOptions, train_in_this_process

    with listening(events or {}):
        allowed = frozenset([allow_change] if isinstance(allow_change, str) else allow_change)
        options = StartOptions(allow_change=allowed, start_over=start_over, advice=explain_model_errors, place=place)
        return train_in_this_process(Parameters.of(parameters, overrides), folder, options)
