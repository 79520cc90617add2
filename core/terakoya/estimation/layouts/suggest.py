"""Which layouts of a run over many GPUs fit their memory, and how fast each would be: the fastest first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from terakoya.components import batch_table
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.estimation.engine_memory import AHEAD, BUCKET, FLOAT32, LIVE
from terakoya.estimation.layouts.cluster import Cluster, Layout, Program, Recomputation
from terakoya.estimation.layouts.rank_memory import rank_memory
from terakoya.estimation.layouts.step_time import StepTime, step_time
from terakoya.estimation.layouts.transformer import Transformer

USABLE = 0.92
"""The share of a device's memory that tensors may take: the rest is its context and gaps between tensors."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""How many devices an axis other than the data's may have, and rows a micro-batch."""
PIECES = "pp_stages_per_process"
REFUSED = 2
"""How many layouts are told of that this program does not run."""

Candidate = tuple[dict[str, Any], Layout, Program]
"""What to write as `parallel`, the layout that it is, and what its engine keeps and moves."""


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits.

    Attributes:
        parallel, micro_batch_size, activation_checkpointing: what to write into the parameters.
        memory: bytes by part of the device that holds most.
        time: of a step, by what it goes to.
        refused: why this program does not run it; None where it does.
    """

    parallel: Mapping[str, Any]
    micro_batch_size: int
    activation_checkpointing: Recomputation | None
    layout: Layout
    memory: Mapping[str, float]
    time: StepTime
    refused: str | None

    @property
    def bytes(self) -> float:
        """All of its memory."""
        return sum(self.memory.values())

    def hours(self, steps: int) -> float:
        """Of a run of `steps`."""
        return steps * self.time.seconds / 3600

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        time = self.time
        return {
            **asdict(self), "bytes": self.bytes, "seconds_per_step": time.seconds,
            "tokens_per_second": time.tokens_per_second, "tflops": time.tflops, "mfu": time.mfu,
        }  # fmt: skip


def suggest(
    parameters: Parameters, model: Transformer, cluster: Cluster, *, state: float = 8.0, count: int = 5
) -> list[Suggestion]:
    """The `count` fastest layouts of the run on `cluster` that fit its memory and that this program runs, each with the
    micro-batch that is fastest, and the two fastest beside them that it does not run; sorted by time.

    Args:
        model: that of `parameters`, see `measure_transformer`.
        state: bytes of the optimizer's state for each weight.

    Raises:
        UserError: no layout fits.
    """
    found: list[Suggestion] = []
    told: dict[bool, set[str]] = {True: set(), False: set()}  # whether it runs -> what has been told of
    for time, memory, (parallel, layout, _) in _fitting(model, cluster, sum(parameters.batch_size.values()), state):
        name = json.dumps({**parallel, PIECES: None})  # one of those that differ in this alone is enough
        if name in told[True]:
            continue
        reason = refused(parameters, parallel, layout)
        if reason is not None and (name in told[False] or len(told[False]) == REFUSED):
            continue
        told[reason is None].add(name)
        micro_batch, recomputation = layout.micro_batch_size, layout.recomputation
        found.append(Suggestion(parallel, micro_batch, recomputation, layout, memory, time, reason))
        if len(told[True]) == count:
            break
    return found


def _fitting(
    model: Transformer, cluster: Cluster, rows: int, state: float
) -> list[tuple[StepTime, Mapping[str, float], Candidate]]:
    """The candidates that fit with the micro-batch that is fastest, one for each `parallel` and recomputation, sorted
    by time."""
    best: dict[str, tuple[StepTime, Mapping[str, float], Candidate]] = {}
    least: tuple[float, str] | None = None
    for candidate in candidates(model, cluster, rows, state):
        parallel, layout, program = candidate
        memory = rank_memory(model, layout, program)
        size = sum(memory.values())
        if least is None or size < least[0]:
            least = (size, json.dumps(parallel))
        if size > USABLE * cluster.gpu.memory:
            continue
        time = step_time(model, layout, cluster, program)
        name = f"{json.dumps(parallel)} {layout.recomputation}"
        if name not in best or time.seconds < best[name][0].seconds:
            best[name] = (time, memory, candidate)
    if best:
        return sorted(best.values(), key=lambda each: each[0].seconds)
    if least is None:
        raise UserError(
            f"--gpus {cluster.gpus}: batch_size has {rows} rows, fewer than there are replicas in any layout"
        )
    raise UserError(
        f"--gpus {cluster.gpus}: nothing fits {USABLE * cluster.gpu.memory / 1e9:.0f} GB of a {cluster.gpu.name}; "
        f"least takes {least[1]}: {least[0] / 1e9:.0f} GB. Take more GPUs, shorter rows or a smaller model"
    )


def candidates(model: Transformer, cluster: Cluster, rows: int, state: float) -> Iterator[Candidate]:
    """Every layout worth a look: what to write as `parallel`, the layout, and what the engine keeps and moves."""
    for parallel, axes in _parallels(model, cluster):
        replicas = axes.data
        if replicas > rows:
            continue
        mine = -(-rows // replicas)
        for size in SIZES:
            if size > mine:
                break
            steps = -(-mine // size)
            for recomputation in (None, *get_args(Recomputation)):
                layout = axes.changed(micro_batch_size=size, micro_steps=steps, recomputation=recomputation)
                yield parallel, layout, engine_program(parallel, model, state)


def engine_program(parallel: Mapping[str, Any], model: Transformer, state: float) -> Program:
    """What an engine of this program keeps and moves: all float32; `state` is the optimizer's, bytes a weight."""
    if parallel["engine"] == "deepspeed":
        bucket = min(BUCKET, model.parameters) if parallel["zero_stage"] else 0
        if parallel["zero_stage"] == 2:  # and once more as it is sent
            bucket *= 2
        ahead = min(AHEAD, model.parameters) if parallel["zero_stage"] == 3 else 0
        size = FLOAT32 * (bucket + ahead)
        return Program(optimizer=state, partition=FLOAT32, bucket=size, live=LIVE, ends_shared=False)
    if parallel["engine"] == "fsdp":  # what is in no block stays whole, and so do its gradients, to the backward's end
        ends = model.embedding_weights + model.head_weights
        size = FLOAT32 * (ends + model.layer_weights)
        return Program(optimizer=state, bucket=size, live=ends + 2 * model.layer_weights, ends_shared=False)
    return Program(optimizer=state, travels=FLOAT32, ends_shared=False)


def refused(parameters: Parameters, parallel: Mapping[str, Any], layout: Layout) -> str | None:
    """Why the parameters with this layout would be refused; None where they are not."""
    raw = parameters.dump()
    raw |= {"parallel": dict(parallel), "activation_checkpointing": layout.recomputation}
    try:
        Parameters.from_dict(raw, source="layout")
    except UserError as error:
        return str(error).removeprefix("layout: ").splitlines()[0]
    return None


def batch_size(parameters: Parameters, cluster: Cluster) -> dict[str, int]:
    """The parameters' table of rows for the nodes of `cluster`: as it is if it is for as many, else equally split."""
    table = parameters.batch_size
    nodes = -(-cluster.gpus // cluster.per_node)
    if len(table) == nodes:
        return dict(table)
    if nodes == 1:
        return {batch_table.ONLY_NODE: sum(table.values())}
    rows = batch_table.split_proportionally([1] * nodes, sum(table.values()))
    return {str(node): each for node, each in enumerate(rows)}


def _parallels(model: Transformer, cluster: Cluster) -> Iterator[tuple[dict[str, Any], Layout]]:
    """What may be written as `parallel` on all of the cluster's GPUs, with the axes that it means."""
    for tensor in SIZES:
        if tensor > cluster.per_node or model.heads % tensor or model.key_value_heads % tensor:
            continue
        for pipeline in SIZES:
            if model.layers % pipeline or cluster.gpus % (tensor * pipeline):
                continue
            data = cluster.gpus // (tensor * pipeline)
            axes = Layout(data=data, tensor=tensor, pipeline=pipeline, stages_near=True)
            sizes = {"tp_size": tensor} if tensor > 1 else {}
            sizes |= {"pp_size": pipeline} if pipeline > 1 else {}
            yield {"engine": "ddp", **sizes}, axes
            if pipeline > 1:
                for pieces in (2, 4):
                    if model.layers % (pipeline * pieces) == 0:
                        interleaved = {"engine": "ddp", **sizes, PIECES: pieces}
                        yield interleaved, axes.changed(virtual=pieces)
            if data > 1:
                for stage in (0, 1, 2, 3):
                    parallel = {"engine": "deepspeed", "zero_stage": stage, **sizes}
                    if stage or not sizes:
                        yield parallel, axes.changed(zero_stage=stage)
                yield {"engine": "fsdp", **sizes}, axes.changed(zero_stage=3)
    for sequence in SIZES[1:]:
        divides = all(each % sequence == 0 for each in (model.heads, model.key_value_heads, cluster.gpus))
        if divides and sequence <= cluster.per_node:
            yield {"engine": "ddp", "sp_size": sequence}, Layout(data=cluster.gpus // sequence, sequence=sequence)
