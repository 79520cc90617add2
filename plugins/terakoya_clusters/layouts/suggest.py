"""Suggests layouts of a run over many GPUs: those that fit into memory, sorted by their estimated speed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, get_args

from terakoya.config import batch_table
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_clusters.layouts.cluster import Cluster, Layout, Program, Recomputation
from terakoya_clusters.layouts.rank_memory import rank_memory
from terakoya_clusters.layouts.step_time import StepTime, step_time
from terakoya_clusters.layouts.transformer import Transformer
from terakoya_planning.engine_memory import AHEAD, BUCKET, FLOAT16, FLOAT32, LIVE

USABLE = 0.92
"""Fraction of a device's memory that tensors may take: the rest is its context and fragmentation."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Devices along an axis other than data, and rows of a micro-batch."""
STAGES_PER_PROCESS, SEQUENCE_PARALLEL = "pp_stages_per_process", "sequence_parallel"
OWN = (
    "zero_stage", "tp_size", "pp_size", "sp_size", "cp_size", "dp_shard_size", STAGES_PER_PROCESS, SEQUENCE_PARALLEL,
)  # fmt: skip
"""The keys of `parallel` that make a layout, beside the engine."""
UNSUPPORTED = 2
"""Number of suggested layouts that this program does not support."""

Candidate = tuple[dict[str, Any], Layout, Program]
"""The value of `parallel`, the layout that it means, and what its engine holds and sends."""


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits into memory.

    Attributes:
        parallel, micro_batch_size, activation_checkpointing: values for the parameters.
        memory: bytes by part of the device that holds most.
        time: estimated time of a step, by cause.
        refused: why this program does not support it; None where it does.
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
        """Bytes of the device that holds most."""
        return sum(self.memory.values())

    def hours(self, steps: int) -> float:
        """Hours of a run of `steps`."""
        return steps * self.time.seconds / 3600

    def as_json(self) -> dict[str, Any]:
        """All fields and the derived numbers, for JSON."""
        time = self.time
        return {
            **asdict(self), "bytes": self.bytes, "seconds_per_step": time.seconds,
            "tokens_per_second": time.tokens_per_second, "tflops": time.tflops, "mfu": time.mfu,
        }  # fmt: skip


def suggest(
    parameters: Parameters, model: Transformer, cluster: Cluster, *, state: float = 8.0, count: int = 5
) -> list[Suggestion]:
    """Returns the `count` fastest layouts of the run on `cluster` that fit into memory and that this program supports,
    each with its fastest micro-batch, and up to two faster ones that it does not support; sorted by time.

    Args:
        model: the model of `parameters`, see `measure_transformer`.
        state: bytes of the optimizer's state for each weight.

    Raises:
        UserError: no layout fits.
    """
    suggestions: list[Suggestion] = []
    names: dict[bool, set[str]] = {True: set(), False: set()}  # whether supported -> layouts suggested so far
    rows, precision = sum(parameters.batch_size.values()), parameters.precision
    for time, memory, (parallel, layout, _) in _fitting(model, cluster, rows, state, precision):
        # one of those that differ only in these is enough
        name = json.dumps({**parallel, STAGES_PER_PROCESS: None, SEQUENCE_PARALLEL: None}, sort_keys=True)
        if name in names[True]:
            continue
        reason = refusal_reason(parameters, parallel, layout)
        if reason is not None and (name in names[False] or len(names[False]) == UNSUPPORTED):
            continue
        names[reason is None].add(name)
        micro_batch, recomputation = layout.micro_batch_size, layout.recomputation
        suggestions.append(Suggestion(parallel, micro_batch, recomputation, layout, memory, time, reason))
        if len(names[True]) == count:
            break
    return suggestions


def _fitting(
    model: Transformer, cluster: Cluster, rows: int, state: float, precision: str
) -> list[tuple[StepTime, Mapping[str, float], Candidate]]:
    """Returns the candidates that fit, with their fastest micro-batch, one for each `parallel` and recomputation,
    sorted by time."""
    best: dict[str, tuple[StepTime, Mapping[str, float], Candidate]] = {}
    least: tuple[float, str] | None = None
    for candidate in candidates(model, cluster, rows, state, precision):
        parallel, layout, program = candidate
        memory = rank_memory(model, layout, program)
        size = sum(memory.values())
        if least is None or size < least[0]:
            least = (size, json.dumps(parallel))
        if size > USABLE * cluster.gpu.memory:
            continue
        time = step_time(model, layout, cluster, program)
        if layout.rows > rows:  # the last micro-batches of some replicas are not full
            time = replace(time, tokens=rows * model.sequence_length)
        name = f"{json.dumps(parallel)} {layout.recomputation}"
        if name not in best or time.seconds < best[name][0].seconds:
            best[name] = (time, memory, candidate)
    if best:
        return sorted(best.values(), key=lambda candidate: candidate[0].seconds)
    if least is None:
        raise UserError(f"--gpus {cluster.gpus}: batch_size has {rows} rows, fewer than the replicas of every layout")
    raise UserError(
        f"--gpus {cluster.gpus}: no layout fits into {USABLE * cluster.gpu.memory / 1e9:.0f} GB of a "
        f"{cluster.gpu.name}; the smallest is {least[1]}: {least[0] / 1e9:.0f} GB. Use more GPUs, shorter rows or a "
        "smaller model"
    )


def candidates(model: Transformer, cluster: Cluster, rows: int, state: float, precision: str) -> Iterator[Candidate]:
    """Yields every layout to compare: the value of `parallel`, the layout, and what its engine holds and sends."""
    for parallel, axes in _parallels(model, cluster):
        replicas = axes.data
        if replicas > rows:
            continue
        replica_rows = -(-rows // replicas)
        for size in SIZES:
            if size > replica_rows:
                break
            steps = -(-replica_rows // size)
            for recomputation in (None, *get_args(Recomputation)):
                layout = axes.replace(micro_batch_size=size, micro_steps=steps, recomputation=recomputation)
                yield parallel, layout, engine_program(parallel, model, state, precision)


def engine_program(parallel: Mapping[str, Any], model: Transformer, state: float, precision: str) -> Program:
    """What an engine of this program holds and sends, in float32 but for blocks that `fully_shard` gathers in 16 bits;
    `state` is the optimizer's, bytes per weight."""
    low = FLOAT32 if precision == "fp32" else FLOAT16
    program = Program(
        optimizer=state, computed=low, entering=FLOAT32, gathers_again=True, recomputed_reductions=1, hidden=FLOAT32
    )
    if parallel["engine"] == "deepspeed":
        bucket = min(BUCKET, model.parameters) if parallel["zero_stage"] else 0
        if parallel["zero_stage"] == 2:  # a copy is sent
            bucket *= 2
        ahead = min(AHEAD, model.parameters) if parallel["zero_stage"] == 3 else 0
        size = FLOAT32 * (bucket + ahead)
        return replace(program, partition=FLOAT32, bucket=size, max_gathered=LIVE)
    if parallel["engine"] == "fsdp":  # weights outside of blocks, and their gradients, stay whole
        tensor = parallel.get("tp_size", 1)
        ends = (model.embedding_weights + model.head_weights) / tensor
        sent = FLOAT32 if precision == "fp32" else FLOAT16 + FLOAT32  # a block's gradient, and what is sent of it
        layer = model.layer_weights / tensor
        pipeline = parallel.get("pp_size", 1) > 1
        return replace(
            program,
            # a stage's weights stay gathered in a pipeline, those outside of blocks in float32
            weights=low if pipeline else FLOAT32, partition=FLOAT32 if pipeline else 0,
            gathered=low,
            bucket=FLOAT32 * ends + sent * layer + ((FLOAT32 - low) * ends if pipeline else 0),
            max_gathered=ends * FLOAT32 / low + 2 * layer, cast_weights=precision == "fp32",
        )  # fmt: skip
    return program


def refusal_reason(parameters: Parameters, parallel: Mapping[str, Any], layout: Layout) -> str | None:
    """Why the parameters with this layout are refused; None where they are accepted."""
    raw = parameters.dump()
    raw |= {"parallel": dict(parallel), "activation_checkpointing": layout.recomputation}
    try:
        Parameters.from_dict(raw, source="layout")
    except UserError as error:
        return str(error).removeprefix("layout: ").splitlines()[0]
    return None


def own_memory(parameters: Parameters, model: Transformer, cluster: Cluster, *, state: float = 8.0) -> float | None:
    """Returns the bytes of the device that holds most in the layout that `parameters` have themselves; None where the
    cluster's GPUs do not form it."""
    rows = sum(parameters.batch_size.values())
    own = parameters.parallel.model_dump(include=set(OWN), exclude_defaults=True)
    own["engine"] = parameters.parallel.engine
    for parallel, axes in _parallels(model, cluster):
        if parallel == own and axes.data <= rows:
            most = -(-rows // axes.data)
            size = min(parameters.micro_batch_size or most, most)
            recomputation = parameters.activation_checkpointing
            layout = axes.replace(micro_batch_size=size, micro_steps=-(-most // size), recomputation=recomputation)
            return sum(rank_memory(model, layout, engine_program(own, model, state, parameters.precision)).values())
    return None


def batch_size_for(cluster: Cluster, table: Mapping[str, int]) -> dict[str, int]:
    """The `batch_size` of `table` for the nodes of `cluster`: `table` itself if it has as many nodes, else its rows
    divided equally."""
    nodes = -(-cluster.gpus // cluster.per_node)
    if len(table) == nodes:
        return dict(table)
    if nodes == 1:
        return {batch_table.ONLY_NODE: sum(table.values())}
    rows = batch_table.split_proportionally([1] * nodes, sum(table.values()))
    return {str(node): node_rows for node, node_rows in enumerate(rows)}


def _parallels(model: Transformer, cluster: Cluster) -> Iterator[tuple[dict[str, Any], Layout]]:
    """Yields every value of `parallel` that uses all of the cluster's GPUs, with the axes that it means."""
    for tensor, share in product(SIZES, (False, True)):
        if tensor > cluster.per_node or model.heads % tensor or model.key_value_heads % tensor:
            continue
        if share and (tensor == 1 or model.sequence_length % tensor):
            continue
        divided = {"tp_size": tensor} if tensor > 1 else {}
        divided |= {SEQUENCE_PARALLEL: True} if share else {}
        for pipeline in SIZES:
            if model.layers % pipeline or cluster.gpus % (tensor * pipeline):
                continue
            data = cluster.gpus // (tensor * pipeline)
            axes = Layout(data=data, tensor=tensor, pipeline=pipeline, norms_shared=share, stages_near=True)
            sizes = divided | ({"pp_size": pipeline} if pipeline > 1 else {})
            yield {"engine": "ddp", **sizes}, axes
            if pipeline > 1:
                for stages in (2, 4):
                    if model.layers % (pipeline * stages) == 0:
                        interleaved = {"engine": "ddp", **sizes, STAGES_PER_PROCESS: stages}
                        yield interleaved, axes.replace(virtual=stages)
            if data > 1:
                for stage in () if sizes else (0, 1, 2, 3):
                    yield {"engine": "deepspeed", "zero_stage": stage}, axes.replace(zero_stage=stage)
                # in a pipeline weights and gradients are whole during a step
                yield {"engine": "fsdp", **sizes}, axes.replace(zero_stage=3 if pipeline == 1 else 1)
                node = cluster.per_node
                if not sizes and node < data and data % node == 0 and node > 1:
                    yield {"engine": "fsdp", "dp_shard_size": node}, axes.replace(zero_stage=3, shard=node)
        for key, sequence in product(("sp_size", "cp_size"), SIZES[1:]):
            both = tensor * sequence
            if cluster.gpus % both or both > cluster.per_node or model.sequence_length % (both if share else sequence):
                continue
            if key == "sp_size" and (tensor > 1 or model.heads % sequence or model.key_value_heads % sequence):
                continue
            axes = Layout(
                data=cluster.gpus // both, tensor=tensor, sequence=sequence, norms_shared=share,
                keys_gathered=key == "cp_size",
            )  # fmt: skip
            yield {"engine": "ddp", **divided, key: sequence}, axes
            yield {"engine": "fsdp", **divided, key: sequence}, axes.replace(zero_stage=3)
