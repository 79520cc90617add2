"""`terakoya estimate`: what a run will take, before it is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from terakoya.estimation.estimate import Estimate


def command(
    parameters: Annotated[Path, typer.Argument(help="The parameter JSON.", metavar="PARAMETERS.json")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, over the file's.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="All processes, one a device. Default: the fewest it can run in.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="The same, and the fastest layouts over as many GPUs that fit.")
    ] = None,
    per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="With --gpus: how many a node has.")] = 8,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", "--gpu", help="What each trains on: h100, a100-80gb, ... or cpu. Default: what is here."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=16, help="Pieces of the vocabulary, where the stores are not there yet.")
    ] = None,
    mfu: Annotated[
        float | None, typer.Option(min=0.0001, max=1.0, help="Share of the device's bf16 peak to reckon hours with.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(min=1e-6, help="Instead: TFLOP/s of a device, as a run's record says.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a run will take: parameters, FLOPs, memory of each rank, disk, hours.

    Nothing is trained and no weight is allocated: one step is run on tensors without data.
    """
    from terakoya.commands import estimate_layouts
    from terakoya.estimation.estimate import estimate
    from terakoya.log import console, error_console

    if gpus is not None and processes is not None:
        raise UserError(f"--gpus {gpus}: is --processes {processes} with more to it; give one of them")
    overrides = tuple(set_ or ())
    layouts = None
    with error_console().status("measuring", spinner="dots"):
        if gpus is not None:
            layouts = estimate_layouts.find(
                parameters, gpus, per_node=per_node, gpu=device, vocab_size=vocab_size, overrides=overrides
            )
            device = layouts.cluster.gpu.name
        found = estimate(
            parameters, processes=gpus or processes, device=device, vocab_size=vocab_size, mfu=mfu, tflops=tflops,
            overrides=overrides,
        )  # fmt: skip
    if as_json:
        more = {} if layouts is None else layouts.as_json(found.steps)
        typer.echo(json.dumps(found.as_json() | more, indent=2, ensure_ascii=False))
        return
    console().print(_model(found))
    console().print(_memory(found))
    for line in _rest(found):
        console().print(line, markup=False, soft_wrap=True)
    if layouts is not None:
        layouts.show(found.steps)


def gigabytes(size: float) -> str:
    """For example `12.3 GB`; small sizes in MB. 1 GB is 10^9 bytes."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number == 1 else "left", no_wrap=number < 2)
    return table


def _model(found: Estimate) -> Table:
    sizes, share = found.sizes, found.share
    table = _table("model and work", "", "")
    table.add_row("parameters", f"{sizes.parameters:,}", f"{sizes.trained:,} trained, {sizes.embeddings:,} embeddings")
    table.add_row("FLOPs a token", f"{sizes.flops_per_token:.3e}", "forward and backward")
    micro = f"{share.micro_steps} micro-step{'s' if share.micro_steps > 1 else ''} of {share.micro_batch_size}"
    rows = f"{found.tokens_per_step:,.0f} tokens in {share.global_rows:,} rows; each process {micro}"
    table.add_row("FLOPs a step", f"{found.flops_per_step:.3e}", rows)
    if found.flops is not None:
        table.add_row("FLOPs of the run", f"{found.flops:.3e}", f"{found.steps:,} steps")
    return table


def _memory(found: Estimate) -> Table:
    memory = found.memory
    engine = found.engine if found.zero_stage is None else f"ZeRO stage {found.zero_stage}"
    title = f"memory of each of {found.processes} ranks ({engine})" if found.processes > 1 else "memory"
    table = _table(title, "", "")
    for part, size in memory.parts.items():
        table.add_row(part, gigabytes(size), f"{100 * size / memory.peak:.0f} %")
    fits = ""
    offloaded = sum(memory.offloaded.values())
    if found.device.memory:
        verdict = "fits into" if found.fits else "does NOT fit into"
        fits = f"; {verdict} {found.device.name}'s {gigabytes(found.device.memory)}"
    table.add_row("all tensors", gigabytes(memory.peak), f"at the peak, in the {memory.moment}{fits}", style="bold")
    if offloaded:
        parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in memory.offloaded.items())
        table.add_row("offloaded", gigabytes(offloaded), f"beside them, on the host: {parts}")
    table.add_row("process", gigabytes(memory.interpreter), "beside them: interpreter and libraries, on the host")
    table.add_row("read ahead", gigabytes(memory.read_ahead), "beside them: batches that wait, on the host")
    return table


def _rest(found: Estimate) -> list[str]:
    state, model = found.checkpoint["state"], found.checkpoint["model"]
    lines = [
        f"checkpoint: {gigabytes(state + model)} (state {gigabytes(state)}, model {gigabytes(model)}); "
        f"{gigabytes(found.disk)} of disk for all that are kept and one being written"
    ]
    of = f"{found.processes} x {found.device.name}"
    if found.hours is not None:
        speed = f"an MFU of {found.mfu:.2g}" if found.mfu is not None else "the TFLOP/s given"
        lines.append(f"time: {_duration(found.hours)} on {of}, with {speed}")
    elif found.flops is not None:
        lines.append(f"time: not known for {of}; say what it does: --tflops 0.05, or another --device")
    stages = found.pipeline_stages
    lines.append(f"pipeline stages: {stages if stages > 1 else 'one; each rank runs all layers'}")
    return lines + [f"note: {note}" for note in found.notes]


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} minutes"
    return f"{hours:,.1f} hours" + (f" ({hours / 24:,.1f} days)" if hours > 48 else "")
