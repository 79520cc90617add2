"""`terakoya train`: pre-train from a parameter JSON, in one process or many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.config.parameters import Parameters
    from terakoya.training.trainer import TrainResult


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
) -> Parameters:
    """The parameters in `file`, or with `model_type` those of a named entry of the field's original parameter.json.

    Raises:
        UserError: see `Parameters.load` and `read_field_parameters`; options that belong to the other format.
    """
    from terakoya.config.language_pretraining_json import read_field_parameters
    from terakoya.config.parameters import Parameters

    if model_type is None:
        if data or validation or whole_word_mask or fp16_type is not None:
            raise UserError(
                "--data, --validation, --do_whole_word_mask and --fp16_type go with --model-type; "
                "else the parameter file says it all"
            )
        return Parameters.load(file, overrides)
    if not data:
        raise UserError("--model-type: the original parameter.json names no data; add --data STORE")
    raw = read_field_parameters(
        file, model_type, data, validation,
        whole_word_mask=whole_word_mask, fp16_type=fp16_type, processes_per_node=processes,
    )  # fmt: skip
    return Parameters.from_dict(raw, source=str(file), overrides=overrides)


def train(
    parameters: Path | Parameters,
    out: Path,
    *,
    overrides: Sequence[str] = (),
    processes: int | None = None,
    node_rank: int | None = None,
    allow_change: Sequence[str] = (),
) -> TrainResult:
    """Trains into the folder `out`, going on where it stands; for notebooks and other programs.

    Runs in this process, as one of those a launcher started if there was one. For several processes on this machine
    use the command line or `terakoya.launch.local.run_processes`.

    Raises:
        UserError: anything the user can mend.
    """
    from terakoya.training.setup import train_here

    loaded = read_parameters(parameters, overrides=overrides) if isinstance(parameters, Path) else parameters
    return train_here(
        loaded, out, node_rank=node_rank, expected_processes=processes, allow_change=frozenset(allow_change)
    )


def command(
    parameters: Annotated[Path, typer.Argument(help="The parameter JSON.", metavar="PARAMETERS.json")],
    out: Annotated[Path, typer.Option(help="The run's folder; training continues if it holds a checkpoint.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, over the file's.")] = None,
    model_type: Annotated[str | None, typer.Option(help="An entry of the field's original parameter.json.")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="With --model-type: the store(s) to train on.")] = None,
    validation: Annotated[list[Path] | None, typer.Option(help="With --model-type: held-out store(s).")] = None,
    whole_word_mask: Annotated[
        bool, typer.Option("--do_whole_word_mask", "--do-whole-word-mask", help="With --model-type: mask whole words.")
    ] = False,
    fp16_type: Annotated[
        int | None, typer.Option("--fp16_type", "--fp16-type", help="With --model-type: as the original's flag.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine; default: one a GPU. Checked under a launcher.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="This node's rank; default GROUP_RANK, SLURM_NODEID, 0.")
    ] = None,
    allow_change: Annotated[
        list[str] | None, typer.Option(help="On resume: a parameter that may differ from the checkpoint's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check data, world, batch and disk, take one step, write nothing.")
    ] = False,
) -> None:
    """Pre-train a model. Ctrl-C and SIGTERM save and leave; the same command goes on."""
    from terakoya.training.distributed.topology import Launched

    loaded = read_parameters(
        parameters, overrides=set_ or (), model_type=model_type, data=data or (), validation=validation or (),
        whole_word_mask=whole_word_mask, fp16_type=fp16_type, processes=processes or 1,
    )  # fmt: skip
    launched = Launched.read(node_rank=node_rank)
    if launched.launcher is None:
        wanted = processes or _visible_gpus()
        if wanted > 1:
            raise typer.Exit(_start(wanted, dry_run=dry_run))
    if dry_run:
        from terakoya.training.dry_run import dry_run as check

        check(loaded, out, node_rank=node_rank, expected_processes=processes)
        return
    result = train(loaded, out, processes=processes, node_rank=node_rank, allow_change=allow_change or ())
    from terakoya.training.distributed import signals

    if result.stopped_by or signals.ENDED_NOTE in os.environ:
        signals.leave()
    raise typer.Exit(signals.exit_code(stopped=result.stopped_by is not None))


def _visible_gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _start(processes: int, *, dry_run: bool) -> int:
    """Starts this very command again in `processes` processes."""
    import sys

    from rich.console import Console

    from terakoya.launch.local import run_processes

    Console(stderr=True, highlight=False).print(f"starting {processes} processes on this machine")
    return run_processes(sys.argv[1:], processes)
