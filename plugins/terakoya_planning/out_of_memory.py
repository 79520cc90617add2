"""Explains an out-of-memory error: how much was requested, what takes most memory, and which settings save how much."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.conflicts import takes_cuda_graphs
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import RankBatch, rank_batches
from terakoya.errors import UserError

SIGNS = re.compile(r"out of memory|not enough memory|can't allocate memory|cannot allocate memory|std::bad_alloc", re.I)
"""Words in the errors of torch's allocators, which on a CPU are plain RuntimeErrors."""
REQUESTED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+) ?(bytes|[KMGTPE]iB)", re.I)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "eib": 2**60}
MIN_SAVING = 0.01
"""Remedies that save less than this fraction of the peak are not suggested."""
REMEDIES = 3
"""Number of suggested remedies."""


@dataclass(frozen=True)
class Remedy:
    """A key to change: its values before and after, the cost, and whether it stays the same run."""

    key: str
    before: str
    after: Any
    costs: str
    same_run: bool = True

    def describe(self, saved: int | None) -> str:
        """For example `micro_batch_size 16 -> 8: about 10.20 GB less; the global batch stays`."""
        less = "" if saved is None else f" about {saved / 1e9:.2f} GB less;"
        return f"{self.key} {self.before} -> {json.dumps(self.after)}:{less} {self.costs}"


@contextmanager
def explain_allocation_errors(
    parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> Iterator[None]:
    """While open, turns an allocation error into a UserError with advice; first it frees the failed step's memory.

    Each rank explains its own error; the other ranks end in their next collective.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        advice = out_of_memory_error(str(error), parameters, vocabulary, context)
    else:
        return
    raise advice


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(SIGNS.search(str(error)))


def requested_bytes(text: str) -> int | None:
    """The number of bytes that were requested, from an allocator's error `text`; None if it does not say."""
    match = REQUESTED.search(text)
    return round(float(match[1]) * UNITS[match[2].lower()]) if match else None


def out_of_memory_error(
    text: str, parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> UserError:
    """Returns the error for the user from an allocator's error `text`."""
    requested = requested_bytes(text)
    more = "" if requested is None else f": {requested / 1e9:.2f} GB more were requested"
    device = "a GPU" if context.device.type == "cuda" else "this machine"
    lines = [f"rank {context.rank}: {device} is out of memory{more}."]
    rank_batch = _rank_batch(parameters, context)
    candidates = list(remedies(parameters, rank_batch, context.world_size))
    if context.device.type == "cuda" and takes_cuda_graphs(parameters, context.world_size):
        before = json.dumps(parameters.cuda_graphs)
        candidates.insert(0, Remedy("cuda_graphs", before, False, "kernels are started one by one: slower if short"))
    try:
        lines += _advise(candidates, parameters, vocabulary, context)
    except (RuntimeError, MemoryError, UserError) as error:  # advice must not hide the error that it explains
        lines.append(f"The memory of a step could not be estimated ({type(error).__name__}). These settings may help:")
        lines += [f"  {each.describe(None)}" for each in candidates[:REMEDIES]]
    lines.append("`terakoya estimate PARAMETERS.json` shows the whole estimate; written checkpoints are complete.")
    return UserError("\n".join(lines))


def remedies(parameters: Parameters, rank_batch: RankBatch, world_size: int) -> Iterator[Remedy]:
    """Yields settings that can be changed, those that change the run least first."""
    if rank_batch.micro_batch_size > 1:
        before = "null" if parameters.micro_batch_size is None else str(parameters.micro_batch_size)
        shown = f"{before} (here {rank_batch.micro_batch_size})" if before == "null" else before
        costs = "the global batch stays the same, in more micro-steps"
        yield Remedy("micro_batch_size", shown, (rank_batch.micro_batch_size + 1) // 2, costs)
    if parameters.activation_checkpointing != "full":
        before = json.dumps(parameters.activation_checkpointing)
        yield Remedy("activation_checkpointing", before, "full", "blocks are recomputed, about a third more work")
    head_positions = getattr(parameters.objective, "head_positions", 0)
    positions = rank_batch.micro_batch_size * parameters.data.sequence_length
    if head_positions != 0 and (head_positions or positions) > 256:
        after = max(256, (head_positions or positions) // 8)
        yield Remedy("objective.head_positions", json.dumps(head_positions), after, "fewer positions at a time")
    if parameters.precision == "fp32":
        yield Remedy("precision", '"fp32"', "bf16", "matrix products in bfloat16, weights stay float32", same_run=False)
    stage = parameters.parallel.zero_stage or 0
    if world_size > 1 and stage < 3:
        before = json.dumps({"engine": parameters.parallel.engine, "zero_stage": parameters.parallel.zero_stage})
        after_parallel = {"engine": "deepspeed", "zero_stage": 3 if stage else 2}
        yield Remedy(
            "parallel", before, after_parallel, "processes divide what each of them holds now; more communication"
        )
    if parameters.data.sequence_length >= 32:
        length = parameters.data.sequence_length
        costs = "rows are shorter: a different run"
        yield Remedy("data.sequence_length", str(length), length // 2, costs, same_run=False)


def _advise(
    candidates: list[Remedy], parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> list[str]:
    """Lines on what takes the memory, and on the remedies that save most; those that keep the same run are
    preferred."""
    peak, parts, moment = _peak(parameters, vocabulary, context)
    part, most = max(parts.items(), key=lambda item: item[1])
    lines = [
        f"By the estimate a step takes {peak / 1e9:.2f} GB of tensors at its peak, in the {moment}, most of it "
        f"{part}: {most / 1e9:.2f} GB ({100 * most / peak:.0f} %)."
    ]
    helpful: list[tuple[int, Remedy]] = []
    for candidate in candidates:
        if sum(remedy.same_run for _, remedy in helpful) >= REMEDIES and not candidate.same_run:
            continue
        try:
            changed = Parameters.from_dict(
                parameters.dump(), source="", overrides=[f"{candidate.key}={json.dumps(candidate.after)}"]
            )
            saved = peak - _peak(changed, vocabulary, context)[0]
        except UserError:  # incompatible with the other settings
            continue
        if saved > MIN_SAVING * peak:
            helpful.append((saved, candidate))
    helpful.sort(key=lambda pair: (not pair[1].same_run, -pair[0]))
    best = sorted(helpful[:REMEDIES], key=lambda pair: -pair[0])
    if not best:
        return [*lines, "No setting saves much of it: use a smaller model, or more memory."]
    suggestions = (f"  {remedy.describe(saved)}" for saved, remedy in best)
    return [*lines, "These settings help, most effective first:", *suggestions]


def _rank_batch(parameters: Parameters, context: DistributedContext) -> RankBatch:
    """This rank's part of each batch."""
    redistribute = parameters.on_lost_node == "redistribute"
    by_rank = rank_batches(
        parameters.batch_size, parameters.micro_batch_size, context.topology, redistribute=redistribute
    )
    return by_rank[context.rank]


def _peak(
    parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> tuple[int, dict[str, int], str]:
    """Returns the bytes of tensors that each rank holds at the peak, by part too, and the window of the peak."""
    from terakoya_planning.fake_step import model_sizes
    from terakoya_planning.step_memory import measure

    rank_batch = _rank_batch(parameters, context)
    sizes = model_sizes(parameters, vocabulary, context=float(parameters.data.sequence_length))
    memory, _, _ = measure(
        parameters, vocabulary, rank_batch, sizes, processes=context.world_size, gpu=context.device.type == "cuda"
    )
    return memory.peak, dict(memory.parts), memory.moment
