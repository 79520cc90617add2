"""`terakoya estimate`: memory, time and disk that a run needs, before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.commands.guidance import next_command
from terakoya.commands.shared_options import NodesOption, ParametersSet
from terakoya.errors import UserError
from terakoya.log import console, error_console, plural, translated

if TYPE_CHECKING:
    from rich.table import Table

    from terakoya.config.parameters import Parameters
    from terakoya_planning.estimate import Estimate
    from terakoya_planning.phases import PhaseEstimate


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of `terakoya estimate`: its arguments, and what a plugin's option assumes: `assumed_nodes`, the
    number of nodes of a `batch_size` of `{"*": ROWS}` where `nodes` is not given."""

    parameters: Annotated[
        Path, typer.Argument(help="The parameter JSON, or the name of a preset.", metavar="PARAMETERS.json")
    ]
    set_: ParametersSet = None
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes, one per device. Default: the fewest that the run can use."),
    ] = None
    nodes: NodesOption = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device", "--gpu", help="Device of each process: h100, a100-80gb, ... or cpu. Default: this machine's."
        ),
    ] = None
    vocab_size: Annotated[
        int | None, typer.Option(min=16, help="Tokens of the vocabulary, if the stores do not exist yet.")
    ] = None
    mfu: Annotated[
        float | None, typer.Option(min=0.0001, max=1.0, help="Fraction of the device's bf16 peak to assume for hours.")
    ] = None
    tflops: Annotated[
        float | None, typer.Option(min=1e-6, help="Instead of --mfu: TFLOP/s of a device, as a run reports.")
    ] = None
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Where this machine would train: take steps for at most 20 seconds, once, to know its speed.",
        ),
    ] = True
    run: Annotated[
        Path | None, typer.Option(help="A run of these parameters on this machine, whose own speed is taken.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False
    assumed_nodes: int | None = None


def command(request: Request) -> None:
    """Estimate what a run needs: parameters, FLOPs, memory of each rank, disk, hours.

    Memory is that of a step on tensors without data. Hours are from a measurement where there is one: of --run, of
    steps on this machine, or of a card with that name. Otherwise they are a range.
    """
    with error_console().status("measuring", spinner="dots"):
        answer = estimate_run(request)
    show(request, answer)
    if not request.as_json:
        suggest_next(request)


@dataclass(frozen=True)
class Answer:
    """The estimate of a run of `parameters`, and those of its phases."""

    parameters: Parameters
    estimate: Estimate
    phases: Sequence[PhaseEstimate]


def estimate_run(request: Request) -> Answer:
    """Returns the estimate. Raises UserError for wrong parameters, and for a --run that is of others."""
    from terakoya.config.parameters import Parameters
    from terakoya_planning.estimate import estimate, with_speed
    from terakoya_planning.kept_rates import LEAST_STEPS_OF_RUN, seconds_of_run
    from terakoya_planning.measuring import measure_here
    from terakoya_planning.phases import estimate_phases, whole_run
    from terakoya_planning.speed import speed_of_run

    loaded = Parameters.load(
        request.parameters, tuple(request.set_ or ()), nodes=request.nodes, assumed_nodes=request.assumed_nodes
    )
    options: dict[str, Any] = {
        "processes": request.processes, "device": request.device, "vocab_size": request.vocab_size,
        "mfu": request.mfu, "tflops": request.tflops, "measure_speed": measure_here if request.measure else None,
    }  # fmt: skip
    phases = estimate_phases(loaded, **options) if loaded.phases else []
    estimated = whole_run(phases, loaded) if phases else estimate(loaded, **options)
    if request.run is not None:
        seconds = seconds_of_run(request.run, loaded, processes=estimated.processes)
        if seconds is None:
            raise UserError(
                f"--run {request.run}: expected a run of these parameters in {estimated.processes} processes, of at "
                f"least {LEAST_STEPS_OF_RUN} steps on this machine with its versions of torch and terakoya"
            )
        estimated = with_speed(estimated, speed_of_run(seconds, request.run), loaded)
    return Answer(loaded, estimated, phases)


def show(request: Request, answer: Answer, more: Mapping[str, Any] | None = None) -> None:
    """Prints tables, or one JSON object with the keys of `more` in it."""
    if request.as_json:
        keys = {**answer.estimate.as_json(), **(more or {})}
        keys |= {"phases": [phase.as_json() for phase in answer.phases]} if answer.phases else {}
        typer.echo(json.dumps(keys, indent=2, ensure_ascii=False))
        return
    if answer.phases:
        console().print(_phase_table(answer.phases))
    console().print(_model_table(answer.estimate))
    console().print(_memory_table(answer.estimate))
    for line in _other_lines(answer.estimate):
        console().print(line, markup=False, soft_wrap=True)


def suggest_next(request: Request) -> None:
    """Prints the command that trains, with the same changes."""
    sets = [word for each in request.set_ or () for word in ("--set", each)]
    sets += [] if request.nodes is None else ["--nodes", str(request.nodes)]
    next_command.show("train", request.parameters, "--out", "work/run", "--dry-run", *sets)


def gigabytes(size: float) -> str:
    """Formats bytes, for example `12.30 GB`; small sizes in MB. 1 GB is 10^9 bytes."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number == 1 else "left", no_wrap=number < 2)
    return table


def _add(table: Table, *cells: str, style: str | None = None) -> None:
    table.add_row(*map(translated, cells), style=style)


def _model_table(estimated: Estimate) -> Table:
    sizes, share = estimated.sizes, estimated.share
    table = _table("model and work", "", "")
    _add(table, "parameters", f"{sizes.parameters:,}", f"{sizes.trained:,} trained, {sizes.embeddings:,} embeddings")
    _add(table, "FLOPs a token", f"{sizes.flops_per_token:.3e}", "forward and backward")
    micro = f"{share.micro_steps} micro-step{plural(share.micro_steps)} of {share.micro_batch_size}"
    rows = f"{estimated.tokens_per_step:,.0f} tokens in {share.global_rows:,} rows; each process {micro}"
    _add(table, "FLOPs a step", f"{estimated.flops_per_step:.3e}", rows)
    if estimated.flops is not None:
        steps = estimated.steps or 0
        _add(table, "FLOPs of the run", f"{estimated.flops:.3e}", f"{steps:,} step{plural(steps)}")
    return table


def _phase_table(phases: Sequence[PhaseEstimate]) -> Table:
    from terakoya_planning.speed import describe_hours

    table = _table("phases", "steps", "rows a step", "memory", "time")
    for number, phase in enumerate(phases, 1):
        hours = phase.estimate.hours
        _add(
            table,
            f"{number} {phase.name}".rstrip(),
            f"{phase.span.steps:,}",
            f"{phase.span.rows_per_step:,} of {phase.sequence_length:,} tokens",
            gigabytes(phase.estimate.memory.peak),
            "unknown" if hours is None else describe_hours(hours),
        )
    return table


def _memory_table(estimated: Estimate) -> Table:
    memory = estimated.memory
    engine = estimated.engine if estimated.zero_stage is None else f"ZeRO stage {estimated.zero_stage}"
    title = f"memory of each of {estimated.processes} ranks ({engine})" if estimated.processes > 1 else "memory"
    table = _table(title, "", "")
    for part, size in memory.parts.items():
        _add(table, part, gigabytes(size), f"{100 * size / memory.peak:.0f} %")
    fits = ""
    offloaded = sum(memory.offloaded.values())
    if estimated.device.memory:
        name, size_there = estimated.device.name, gigabytes(estimated.device.memory)
        fits = f"; fits into {name}'s {size_there}" if estimated.fits else f"; does NOT fit into {name}'s {size_there}"
    moment = translated(memory.moment)
    _add(table, "all tensors", gigabytes(memory.peak), f"at the peak, in the {moment}{fits}", style="bold")
    if offloaded:
        parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in memory.offloaded.items())
        _add(table, "offloaded", gigabytes(offloaded), f"in addition, on the host: {parts}")
    _add(table, "process", gigabytes(memory.interpreter), "in addition: interpreter and libraries, on the host")
    _add(table, "read ahead", gigabytes(memory.read_ahead), "in addition: batches that wait, on the host")
    return table


def _other_lines(estimated: Estimate) -> list[str]:
    from terakoya_planning.speed import describe_hours

    state, model = estimated.checkpoint["state"], estimated.checkpoint["model"]
    lines = [
        f"checkpoint: {gigabytes(state + model)} (state {gigabytes(state)}, model {gigabytes(model)}); "
        f"{gigabytes(estimated.disk)} of disk for all that are kept and one in progress"
    ]
    devices = f"{estimated.processes} x {estimated.device.name}"
    if estimated.hours is not None and estimated.speed is not None:
        time = translated(describe_hours(estimated.hours))
        lines.append(f"time: {time} on {devices}, {translated(estimated.speed.said)}")
    elif estimated.flops is not None:
        lines.append(f"time: unknown for {devices}; give its speed: --tflops 0.05, or another --device")
    stages = estimated.pipeline_stages
    lines.append(f"pipeline stages: {stages if stages > 1 else 'one; each rank runs all layers'}")
    return lines + [f"note: {note}" for note in estimated.notes]
