"""Finds the fastest layouts of a run over many GPUs, and their values for the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.checking.model_check import check_model
from terakoya.config.parameters import Parameters
from terakoya_clusters.layouts.cluster import GPUS, Cluster, find_gpu
from terakoya_clusters.layouts.measured_model import measure_transformer
from terakoya_clusters.layouts.suggest import USABLE, Suggestion, batch_size_for, own_memory, suggest
from terakoya_planning import devices
from terakoya_planning.row_statistics import row_statistics

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
        own: bytes of the device that holds most in the run's own layout; None where the GPUs do not form it.
        held_by: the names of the GPUs that hold and compute it.
    """

    cluster: Cluster
    suggestions: Sequence[Suggestion]
    batch_size: Mapping[str, int]
    notes: Sequence[str]
    own: float | None = None
    held_by: Sequence[str] = ()

    @property
    def fastest_supported(self) -> Suggestion | None:
        """The fastest suggestion that this program supports, if there is one."""
        return next((suggestion for suggestion in self.suggestions if suggestion.refused is None), None)

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
        own = {"bytes": self.own, "held_by": list(self.held_by)}
        return {"layouts": layouts, "own_layout": own, "layout_notes": [NOT_VALIDATED, *self.notes]}

    def as_parameters(self, suggestion: Suggestion) -> dict[str, Any]:
        """The keys of the parameters that select this layout."""
        return {
            "parallel": dict(suggestion.parallel), "micro_batch_size": suggestion.micro_batch_size,
            "activation_checkpointing": suggestion.activation_checkpointing, "batch_size": dict(self.batch_size),
        }  # fmt: skip


def find_layouts(
    parameters: Path,
    gpus: int,
    *,
    per_node: int = 8,
    nodes: int | None = None,
    gpu: str | None = None,
    vocab_size: int | None = None,
    overrides: Sequence[str] = (),
) -> Layouts:
    """Returns the suggested layouts of the run of the file `parameters`, with `overrides`, over `gpus` devices.

    Args:
        per_node: number of GPUs of a node.
        nodes: number of nodes of a `batch_size` of `{"*": ROWS}`; by default those of the GPUs.
        gpu: for example `h100`; by default this machine's, or else `DEFAULT_GPU`.
        vocab_size: number of tokens of the vocabulary, if the stores do not exist yet.

    Raises:
        UserError: wrong parameters or stores, an unknown GPU, an unsupported model, or no layout fits.
    """
    loaded = Parameters.load(parameters, overrides, nodes=nodes, assumed_nodes=-(-gpus // per_node))
    notes = []
    if gpu is None:
        local = devices.local_device()
        gpu = local.name if local.gpu else DEFAULT_GPU
        if not local.gpu:
            notes.append(f"this machine has no GPU: assumes {DEFAULT_GPU}; name another with --gpu")
    cluster = Cluster(find_gpu(gpu), gpus, per_node)
    loaded = loaded.with_precision(devices.precision_on(devices.find_device(gpu)))
    statistics = row_statistics(loaded.data, loaded.objective.row_layout(), vocab_size)
    check_model(loaded, statistics.vocabulary)
    model, state = measure_transformer(
        loaded, statistics.vocabulary, context=statistics.context, documents_per_row=statistics.documents_per_row
    )
    suggestions = suggest(loaded, model, cluster, state=state)
    own = own_memory(loaded, model, cluster, state=state)
    fp8 = loaded.precision == "fp8"
    held_by = [each.name for each in GPUS if own and own <= USABLE * each.memory and (each.has_fp8 or not fp8)]
    return Layouts(cluster, suggestions, batch_size_for(cluster, loaded.batch_size), notes, own, held_by)


def describe_parallel(parallel: Mapping[str, Any]) -> str:
    """Formats `parallel`, for example as `deepspeed, zero_stage 2`."""
    sizes = [name if value is True else f"{name} {value}" for name, value in parallel.items() if name != "engine"]
    return ", ".join([str(parallel["engine"]), *sizes])
