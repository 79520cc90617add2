"""The part of `terakoya estimate --gpus N`: prints the fastest layouts over N GPUs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from terakoya.estimation.layouts.find_layouts import Layouts
    from terakoya.estimation.layouts.suggest import Suggestion


def print_layouts(layouts: Layouts, steps: int | None) -> None:
    """Prints a table, and the JSON of the fastest supported layout."""
    from rich.table import Table
    from rich.text import Text

    from terakoya.estimation.layouts.find_layouts import NOT_VALIDATED
    from terakoya.log import console, translated

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in (
        "parallel",
        "micro-batch",
        "recomputed",
        "memory",
        "a step",
        "tokens/s",
        "MFU",
        "run",
        "supported",
    ):
        table.add_column(name, justify="left" if name in ("parallel", "supported") else "right", no_wrap=True)
    for suggestion in layouts.suggestions:
        table.add_row(*_cells(suggestion, steps))
    cluster = layouts.cluster
    console().print(
        f"layouts over {cluster.gpus} x {cluster.gpu.name}, {min(cluster.gpus, cluster.per_node)} on a node, "
        f"fastest first ({NOT_VALIDATED}):",
        soft_wrap=True,
    )
    console().print(table)
    for note in layouts.notes:
        console().print(f"note: {translated(note)}", markup=False, soft_wrap=True)
    supported = layouts.fastest_supported
    if supported is not None:
        console().print("the fastest supported layout, to write into the parameters:")
        console().print(Text(json.dumps(layouts.as_parameters(supported))[1:-1]), soft_wrap=True)


def _cells(suggestion: Suggestion, steps: int | None) -> tuple[str, ...]:
    """Returns a row of the table."""
    from terakoya.estimation.layouts.find_layouts import describe_parallel
    from terakoya.log import translated

    time = suggestion.time
    hours = "" if steps is None else translated(_duration(suggestion.hours(steps)))
    micro = f"{suggestion.micro_batch_size} x {suggestion.layout.micro_steps}"
    return (
        describe_parallel(suggestion.parallel), micro, suggestion.activation_checkpointing or translated("nothing"),
        f"{suggestion.bytes / 1e9:.1f} GB", f"{time.seconds:.2f} s", f"{time.tokens_per_second:,.0f}",
        f"{time.mfu:.2f}", hours, translated("yes") if suggestion.refused is None else f"no: {suggestion.refused}",
    )  # fmt: skip


def _duration(hours: float) -> str:
    return f"{hours / 24:,.1f} days" if hours > 48 else f"{hours:,.1f} hours"
