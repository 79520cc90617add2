"""`terakoya estimate --gpus N`: the fastest layouts over N GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terakoya.errors import UserError
from terakoya.log import console, error_console, translated

if TYPE_CHECKING:
    from terakoya_clusters.layouts.find_layouts import Layouts
    from terakoya_clusters.layouts.suggest import Suggestion


def estimate(
    verb: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="As --processes, and the fastest layouts over as many GPUs that fit into memory."),
    ] = None,
    per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="With --gpus: GPUs per node.")] = 8,
) -> None:
    """Adds the layouts to what `terakoya estimate` prints, and their speed where no other is known."""
    if gpus is None:
        verb(**arguments)
        return
    from terakoya_clusters.layouts.find_layouts import find_layouts
    from terakoya_planning.commands.estimate import estimate_run, show, suggest_next
    from terakoya_planning.estimate import with_speed
    from terakoya_planning.speed import Speed

    request = arguments["request"]
    if request.processes is not None:
        raise UserError(f"--gpus {gpus}: includes --processes {request.processes}; give one of them")
    with error_console().status("measuring", spinner="dots"):
        layouts = find_layouts(
            request.parameters, gpus, per_node=per_node, nodes=request.nodes, gpu=request.device,
            vocab_size=request.vocab_size, overrides=tuple(request.set_ or ()),
        )  # fmt: skip
        nodes = -(-gpus // per_node)
        request = replace(request, processes=gpus, device=layouts.cluster.gpu.name, assumed_nodes=nodes)
        answer = estimate_run(request)
    # a layout is one of the rows outside of phases: the hours of the run are not its steps times their time
    steps = None if answer.phases else answer.estimate.steps
    speed, fastest = answer.estimate.speed, layouts.fastest_supported
    if fastest is not None and not answer.phases and (speed is None or speed.source not in ("run", "probe", "given")):
        seconds = fastest.time.seconds
        said = "by the formulas for the fastest supported layout below; not a measurement"
        speed = Speed(seconds, seconds, 0.0, "formulas", said)
        answer = replace(answer, estimate=with_speed(answer.estimate, speed, answer.parameters))
    show(request, answer, layouts.as_json(steps))
    if not request.as_json:
        print_layouts(layouts, steps)
        suggest_next(request)


def print_layouts(layouts: Layouts, steps: int | None) -> None:
    """Prints a table, and the JSON of the fastest supported layout."""
    from rich.table import Table
    from rich.text import Text

    from terakoya_clusters.layouts.find_layouts import NOT_VALIDATED

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    rows = [_cells(suggestion, steps) for suggestion in layouts.suggestions]
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("parallel", "supported") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    cluster = layouts.cluster
    console().print(
        f"layouts over {cluster.gpus} x {cluster.gpu.name}, {min(cluster.gpus, cluster.per_node)} on a node, "
        f"fastest first ({NOT_VALIDATED}):",
        soft_wrap=True,
    )
    console().print(table)
    for note in layouts.notes:
        console().print(f"note: {translated(note)}", markup=False, soft_wrap=True)
    if layouts.own is not None:
        held_by = ", ".join(layouts.held_by) or translated("none of those that are known here")
        console().print(f"the run's own layout: {layouts.own / 1e9:.1f} GB a GPU; held by {held_by}", soft_wrap=True)
    supported = layouts.fastest_supported
    if supported is not None:
        console().print("the fastest supported layout, to write into the parameters:")
        console().print(Text(json.dumps(layouts.as_parameters(supported))[1:-1]), soft_wrap=True)


def _cells(suggestion: Suggestion, steps: int | None) -> dict[str, str]:
    from terakoya_clusters.layouts.find_layouts import describe_parallel

    time = suggestion.time
    hours = "" if steps is None else translated(_duration(suggestion.hours(steps)))
    micro = f"{suggestion.micro_batch_size} x {suggestion.layout.micro_steps}"
    return {
        "parallel": describe_parallel(suggestion.parallel), "micro-batch": micro,
        "recomputed": suggestion.activation_checkpointing or translated("nothing"),
        "memory": f"{suggestion.bytes / 1e9:.1f} GB", "a step": f"{time.seconds:.2f} s",
        "tokens/s": f"{time.tokens_per_second:,.0f}", "MFU": f"{time.mfu:.2f}", "run": hours,
        "supported": translated("yes") if suggestion.refused is None else f"no: {suggestion.refused}",
    }  # fmt: skip


def _duration(hours: float) -> str:
    return f"{hours / 24:,.1f} days" if hours > 48 else f"{hours:,.1f} hours"
