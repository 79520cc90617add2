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
    from terakoya.training.distributed.signals import StopRequest
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


def read_parameters(
    file: Path,
    *,
    overrides: Sequence[str] = (),
    model_type: str | None = None,
    data: Sequence[Path] = (),
    validation: Sequence[Path] = (),
    whole_word_mask: bool = False,
    fp16_type: int | None = None,
    processes: int = 1,
    nodes: int | None = None,
) -> Parameters:
    """Reads the parameters in `file`, which may be the name of a preset; with `model_type`, that entry of a
    language-pretraining parameter.json, by default of the one that comes with terakoya.

    Args:
        nodes: the number of nodes, which a `batch_size` of `{"*": ROWS}` needs, and any other has to agree with.

    Raises:
        UserError: see `Parameters.load` and `read_language_pretraining_json`; options of the other format.
    """
    from terakoya.config import batch_table
    from terakoya.config.language_pretraining_json import read_language_pretraining_json
    from terakoya.config.parameters import Parameters
    from terakoya.config.presets import LANGUAGE_PRETRAINING, presets_folder

    if model_type is None:
        if data or validation or whole_word_mask or fp16_type is not None:
            raise UserError(
                "--data, --validation, --do_whole_word_mask and --fp16_type are options of --model-type; "
                "without it the parameter file sets them"
            )
        loaded = Parameters.load(file, overrides, nodes=nodes)
        batch_table.check_nodes(loaded.batch_size, nodes)
        return loaded
    if str(file) == f"{LANGUAGE_PRETRAINING}.json" and not file.exists():
        file = presets_folder() / file
    if not data:
        raise UserError("--model-type: a language-pretraining parameter.json names no data; add --data STORE")
    raw = read_language_pretraining_json(
        file, model_type, data, validation,
        whole_word_mask=whole_word_mask, fp16_type=fp16_type, processes_per_node=processes,
    )  # fmt: skip
    loaded = Parameters.from_dict(raw, source=str(file), overrides=overrides, nodes=nodes)
    batch_table.check_nodes(loaded.batch_size, nodes)
    return loaded


def train(
    parameters: Path | str | Mapping[str, Any] | Parameters,
    out: Path | str,
    *,
    events: Mapping[str, Callable[..., Any]] | None = None,
    overrides: Sequence[str] = (),
    processes: int | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    allow_change: Sequence[str] = (),
    start_over: bool = False,
    work_folder: Path | str | None = None,
    stop: StopRequest | None = None,
) -> TrainResult:
    """Trains into the folder `out`, resuming from its last checkpoint; for notebooks and other programs.

    `parameters` is a file, the name of a preset such as "bert_base", or the content of a parameter file. `events` are
    functions by event, such as `{"step_finished": f}` for `f(run, report)`; `terakoya.hookspecs` describes the events.
    A function that raises an exception ends the run. `nodes` is the number of nodes of a `batch_size` of `{"*": ROWS}`.

    Where `out` is an address such as "s3://bucket/run", the run trains in `work_folder`, by default a folder of the
    user's cache, is mirrored to the address, and continues from there on another machine.

    With `start_over` the run may begin at step 0 although it has had checkpoints, of which none is whole.

    Trains in this process, which may be one of several that a launcher started. To start several processes on this
    machine use the command line or `terakoya.launch.local.run_processes`. `stop` is that of `StartOptions`.

    Raises:
        UserError: an error that the user can fix.
    """
    folder, address = resolve_out(out, work_folder)
    with imports():
        from terakoya.estimation.model_errors import explain_model_errors
        from terakoya.plugins import listening
        from terakoya.training.setup import StartOptions, train_in_this_process

    with listening(events or {}):
        options = StartOptions(
            node_rank=node_rank, expected_processes=processes, allow_change=frozenset(allow_change),
            start_over=start_over, advice=explain_model_errors, stop=stop, mirror_to=address,
        )  # fmt: skip
        return train_in_this_process(_load(parameters, overrides, nodes), folder, options)


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


def _load(
    parameters: Path | str | Mapping[str, Any] | Parameters, overrides: Sequence[str], nodes: int | None
) -> Parameters:
    from terakoya.config import batch_table
    from terakoya.config.parameters import Parameters

    if isinstance(parameters, Path | str):
        return read_parameters(Path(parameters), overrides=overrides, nodes=nodes)
    if isinstance(parameters, Parameters) and not overrides and batch_table.EACH_NODE not in parameters.batch_size:
        batch_table.check_nodes(parameters.batch_size, nodes)
        return parameters
    raw = parameters.dump() if isinstance(parameters, Parameters) else parameters
    loaded = Parameters.from_dict(raw, source="parameters", overrides=overrides, nodes=nodes)
    batch_table.check_nodes(loaded.batch_size, nodes)
    return loaded
