"""`terakoya train`: pre-trains from a parameter JSON, in one or more processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.guidance.run_plugins import naming_missing
from terakoya.commands.shared_options import NodesOption, ParametersSet
from terakoya.errors import Stopped
from terakoya.launch.here import imports
from terakoya.places import place_of

if TYPE_CHECKING:
    from terakoya.config.parameters import Parameters
    from terakoya.distributed.signals import StopRequest
    from terakoya.training.start.meeting import StartOptions


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `train`."""

    parameters: Annotated[
        Path, typer.Argument(help="The parameter JSON, or the name of a preset.", metavar="PARAMETERS.json")
    ]
    out: Annotated[
        Path,
        typer.Option(
            help="The run's folder, or an address such as s3://bucket/run; training continues if it holds a checkpoint."
        ),
    ]
    set_: ParametersSet = None
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes on this machine; default: one a GPU. Under a launcher: the expected number."
        ),
    ] = None
    nodes: NodesOption = None
    node_rank: Annotated[int | None, typer.Option(min=0, help="This node's rank; default: the launcher's, or 0.")] = (
        None
    )
    allow_change: Annotated[
        Sequence[str], typer.Option(help="On resume: a parameter that may differ from the checkpoint's.")
    ] = ()
    start_over: Annotated[
        bool,
        typer.Option("--start-over", help="Allow step 0 in a folder whose checkpoints are all gone or damaged."),
    ] = False
    work_folder: Annotated[
        Path | None,
        typer.Option(help="With an address in --out: the run's folder on this machine. Default: in the user's cache."),
    ] = None
    read: Callable[[Path], Mapping[str, Any]] | None = None
    """Reads the file of another program as a parameter JSON; no option."""
    instead: Callable[[Parameters, Path, StartOptions], None] | None = None
    """What is done with the checked parameters, which writes nothing, instead of training; no option."""


def command(context: typer.Context, options: TrainOptions) -> None:
    """Pre-train a model. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save a checkpoint and exit; the same command resumes."""
    from terakoya.log import announce

    announce(f"terakoya train: reads {options.parameters}, loads PyTorch and Transformers ...")
    from terakoya.atomic_files import check_writable
    from terakoya.config.parameters import Parameters
    from terakoya.distributed import signals
    from terakoya.process_pool import end_with_launcher

    # without this, torch prints C++ frames when a rank is gone, before the line that names the rank
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with signals.StopRequest() as stop:
        stop.leave_during_start()
        if not end_with_launcher():
            raise Stopped("the launcher of this process is gone")
        from terakoya.distributed.topology import LaunchInfo
        from terakoya.rows.stores import check_places
        from terakoya.training.resuming.before_torch import check_start
        from terakoya.training.run_log import recorded_refusal

        place = place_of(options.out)
        folder = place.work_folder(options.work_folder)
        if options.instead is None:
            check_writable(folder)
        launched = LaunchInfo.from_environment(node_rank=options.node_rank)
        refusal = recorded_refusal(folder) if launched.rank == 0 and options.instead is None else nullcontext()
        with refusal, naming_missing(folder):
            loaded = Parameters.load(options.parameters, options.set_ or (), nodes=options.nodes, read=options.read)
            if launched.launcher is None:  # the others would wait for a process that ends before they meet
                if place.is_local:
                    check_start(folder, loaded, frozenset(options.allow_change))
                check_places(loaded)
        if launched.launcher is None:
            count = options.processes or _visible_gpus()
            if count > 1:
                raise typer.Exit(_start_processes(count, stop))
        with imports():
            from terakoya.checking.model_errors import explain_model_errors
            from terakoya.training.setup import StartOptions, train_in_this_process

        start = StartOptions(
            node_rank=options.node_rank, expected_processes=options.processes,
            allow_change=frozenset(options.allow_change), start_over=options.start_over, advice=explain_model_errors,
            stop=stop, place=place,
        )  # fmt: skip
        if options.instead is not None:
            options.instead(loaded, folder, start)
            return
        result = train_in_this_process(loaded, folder, start)
        if launched.rank == 0 and not result.stopped_by:
            next_command.after_training(folder, place)
        elif launched.launcher is None and result.stopped_by:
            next_command.show(*context.meta["arguments"])
        if result.stopped_by or signals.EXIT_CODE_FILE_VARIABLE in os.environ:
            signals.ignore_stop_signals()
        raise typer.Exit(signals.exit_code(stopped=result.stopped_by is not None))


def _visible_gpus() -> int:
    with imports():
        import torch

    return max(1, torch.cuda.device_count())


def _start_processes(processes: int, stop: StopRequest) -> int:
    """Runs this same command in `processes` processes, which get the signals from now on; returns the exit code."""
    from terakoya.launch.local import run_processes
    from terakoya.log import new_console

    new_console(stderr=True).print(f"starting {processes} processes on this machine")
    stop.close()
    return run_processes(sys.argv[1:], processes)
