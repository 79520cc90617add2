"""What `terakoya estimate --gpus N` adds: the fastest layouts over N GPUs, and what to write into the parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terakoya.estimation.layouts.cluster import Cluster
    from terakoya.estimation.layouts.suggest import Suggestion

GUESSED = "h100"
"""The GPU that is taken where none is here and none is named."""
CHECKED = (
    "by formulas that were 6 % off published runs on average and within 12 % of 9 in 10 (tools/simulation/README.md); "
    "the first steps of a run say better"
)


@dataclass(frozen=True)
class Layouts:
    """What was found.

    Attributes:
        suggestions: by time, the fastest first.
        batch_size: the table of rows for as many nodes.
        notes: what was assumed.
    """

    cluster: Cluster
    suggestions: Sequence[Suggestion]
    batch_size: Mapping[str, int]
    notes: Sequence[str]

    def as_json(self, steps: int | None) -> dict[str, Any]:
        """All of it; `hours` where the run's `steps` are known."""
        found = [
            {**each.as_json(), "hours": None if steps is None else each.hours(steps), "write": self.written(each)}
            for each in self.suggestions
        ]
        return {"layouts": found, "layout_notes": list(self.notes)}

    def written(self, suggestion: Suggestion) -> dict[str, Any]:
        """The keys of the parameters that make it this layout."""
        return {
            "parallel": dict(suggestion.parallel), "micro_batch_size": suggestion.micro_batch_size,
            "activation_checkpointing": suggestion.activation_checkpointing, "batch_size": dict(self.batch_size),
        }  # fmt: skip

    def show(self, steps: int | None) -> None:
        """Prints a table, and the JSON of the fastest that runs."""
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
            "runs here",
        ):
            table.add_column(name, justify="left" if name in ("parallel", "runs here") else "right", no_wrap=True)
        for each in self.suggestions:
            table.add_row(*self._cells(each, steps))
        cluster = self.cluster
        console().print(
            f"layouts over {cluster.gpus} x {cluster.gpu.name}, {min(cluster.gpus, cluster.per_node)} on a node, "
            f"fastest first, {CHECKED}:",
            soft_wrap=True,
        )
        console().print(table)
        for note in self.notes:
            console().print(f"note: {note}", markup=False, soft_wrap=True)
        runs = next((each for each in self.suggestions if each.refused is None), None)
        if runs is not None:
            console().print("the fastest that runs here, to write into the parameters:")
            console().print(json.dumps(self.written(runs))[1:-1], markup=False, soft_wrap=True)

    def _cells(self, each: Suggestion, steps: int | None) -> tuple[str, ...]:
        """A row of the table."""
        hours = "" if steps is None else _duration(each.hours(steps))
        micro = f"{each.micro_batch_size} x {each.layout.micro_steps}"
        return (
            shown(each.parallel), micro, each.activation_checkpointing or "nothing", f"{each.bytes / 1e9:.1f} GB",
            f"{each.time.seconds:.2f} s", f"{each.time.tokens_per_second:,.0f}", f"{each.time.mfu:.2f}", hours,
            "yes" if each.refused is None else f"no: {each.refused}",
        )  # fmt: skip


def find(
    parameters: Path,
    gpus: int,
    *,
    per_node: int,
    gpu: str | None,
    vocab_size: int | None,
    overrides: tuple[str, ...],
) -> Layouts:
    """The layouts of the run of `parameters`.

    Raises:
        UserError: parameters, stores, an unknown GPU, a model that cannot be reckoned with, or nothing fits.
    """
    from terakoya.config.parameters import Parameters
    from terakoya.estimation import devices
    from terakoya.estimation.layouts import cluster
    from terakoya.estimation.layouts import suggest as layouts
    from terakoya.estimation.layouts.measured_model import measure_transformer
    from terakoya.estimation.synthetic_rows import row_statistics

    loaded = Parameters.load(parameters, overrides)
    notes = []
    if gpu is None:
        here = devices.local_device()
        gpu = here.name if here.gpu else GUESSED
        if not here.gpu:
            notes.append(f"no GPU is here: each is taken to be an {GUESSED}; name another with --gpu")
    many = cluster.Cluster(cluster.find_gpu(gpu), gpus, per_node)
    text = row_statistics(loaded, vocab_size)
    model, state = measure_transformer(loaded, text.vocabulary, context=text.context)
    suggestions = layouts.suggest(loaded, model, many, state=state)
    return Layouts(many, suggestions, layouts.batch_size(loaded, many), notes)


def shown(parallel: Mapping[str, Any]) -> str:
    """For example `deepspeed, zero_stage 2`."""
    sizes = [f"{name} {value}" for name, value in parallel.items() if name != "engine"]
    return ", ".join([str(parallel["engine"]), *sizes])


def _duration(hours: float) -> str:
    return f"{hours / 24:,.1f} days" if hours > 48 else f"{hours:,.1f} hours"
