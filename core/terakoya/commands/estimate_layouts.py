"""The part of `terakoya estimate --gpus N`: the fastest layouts over N GPUs, and their values for the parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terakoya.estimation.layouts.cluster import Cluster
    from terakoya.estimation.layouts.suggest import Suggestion

DEFAULT_GPU = "h100"
"""The GPU to assume where this machine has none and none is named."""
NOT_VALIDATED = (
    "not validated on hardware: formulas whose mean error on published runs is 6 %, for 9 in 10 within 12 % "
    "(tools/simulation/README.md); measure the first steps of a run"
)


@dataclass(frozen=True)
class Layouts:
    """The suggested layouts.

    Attributes:
        suggestions: sorted by time, the fastest first.
        batch_size: rows by node, for the cluster's nodes.
        notes: assumptions.
    """

    cluster: Cluster
    suggestions: Sequence[Suggestion]
    batch_size: Mapping[str, int]
    notes: Sequence[str]

    def as_json(self, steps: int | None) -> dict[str, Any]:
        """The suggestions and notes for JSON; `hours` if the run's `steps` are known."""
        layouts = [
            {
                **suggestion.as_json(),
                "hours": None if steps is None else suggestion.hours(steps),
                "write": self.as_parameters(suggestion),
            }
            for suggestion in self.suggestions
        ]
        return {"layouts": layouts, "layout_notes": [NOT_VALIDATED, *self.notes]}

    def as_parameters(self, suggestion: Suggestion) -> dict[str, Any]:
        """The keys of the parameters that select this layout."""
        return {
            "parallel": dict(suggestion.parallel), "micro_batch_size": suggestion.micro_batch_size,
            "activation_checkpointing": suggestion.activation_checkpointing, "batch_size": dict(self.batch_size),
        }  # fmt: skip

    def show(self, steps: int | None) -> None:
        """Prints a table, and the JSON of the fastest supported layout."""
        from rich.table import Table

        from terakoya.log import console

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
        for suggestion in self.suggestions:
            table.add_row(*self._cells(suggestion, steps))
        cluster = self.cluster
        console().print(
            f"layouts over {cluster.gpus} x {cluster.gpu.name}, {min(cluster.gpus, cluster.per_node)} on a node, "
            f"fastest first ({NOT_VALIDATED}):",
            soft_wrap=True,
        )
        console().print(table)
        for note in self.notes:
            console().print(f"note: {note}", markup=False, soft_wrap=True)
        supported = next((suggestion for suggestion in self.suggestions if suggestion.refused is None), None)
        if supported is not None:
            console().print("the fastest supported layout, to write into the parameters:")
            console().print(json.dumps(self.as_parameters(supported))[1:-1], markup=False, soft_wrap=True)

    def _cells(self, suggestion: Suggestion, steps: int | None) -> tuple[str, ...]:
        """A row of the table."""
        time = suggestion.time
        hours = "" if steps is None else _duration(suggestion.hours(steps))
        micro = f"{suggestion.micro_batch_size} x {suggestion.layout.micro_steps}"
        return (
            describe_parallel(suggestion.parallel), micro, suggestion.activation_checkpointing or "nothing",
            f"{suggestion.bytes / 1e9:.1f} GB", f"{time.seconds:.2f} s", f"{time.tokens_per_second:,.0f}",
            f"{time.mfu:.2f}", hours, "yes" if suggestion.refused is None else f"no: {suggestion.refused}",
        )  # fmt: skip


def find_layouts(
    parameters: Path,
    gpus: int,
    *,
    per_node: int,
    gpu: str | None,
    vocab_size: int | None,
    overrides: tuple[str, ...],
) -> Layouts:
    """Returns the suggested layouts of the run of `parameters`.

    Raises:
        UserError: wrong parameters or stores, an unknown GPU, an unsupported model, or no layout fits.
    """
    from terakoya.config.parameters import Parameters
    from terakoya.estimation import devices
    from terakoya.estimation.layouts.cluster import Cluster, find_gpu
    from terakoya.estimation.layouts.measured_model import measure_transformer
    from terakoya.estimation.layouts.suggest import batch_size_for, suggest
    from terakoya.estimation.synthetic_rows import row_statistics

    loaded = Parameters.load(parameters, overrides)
    notes = []
    if gpu is None:
        local = devices.local_device()
        gpu = local.name if local.gpu else DEFAULT_GPU
        if not local.gpu:
            notes.append(f"this machine has no GPU: assumes {DEFAULT_GPU}; name another with --gpu")
    cluster = Cluster(find_gpu(gpu), gpus, per_node)
    statistics = row_statistics(loaded.data, loaded.objective.row_layout(), vocab_size)
    model, state = measure_transformer(loaded, statistics.vocabulary, context=statistics.context)
    suggestions = suggest(loaded, model, cluster, state=state)
    return Layouts(cluster, suggestions, batch_size_for(cluster, loaded.batch_size), notes)


def describe_parallel(parallel: Mapping[str, Any]) -> str:
    """Formats `parallel`, for example as `deepspeed, zero_stage 2`."""
    sizes = [f"{name} {value}" for name, value in parallel.items() if name != "engine"]
    return ", ".join([str(parallel["engine"]), *sizes])


def _duration(hours: float) -> str:
    return f"{hours / 24:,.1f} days" if hours > 48 else f"{hours:,.1f} hours"
