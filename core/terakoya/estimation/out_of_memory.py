"""When memory runs out: how much was asked for, what takes most, and what would help, by how much."""

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
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.distributed.topology import RankBatch, rank_batches

SIGNS = re.compile(r"out of memory|not enough memory|can't allocate memory|cannot allocate memory|std::bad_alloc", re.I)
"""What errors of torch's allocators say, which on a CPU are plain RuntimeErrors."""
ASKED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+) ?(bytes|[KMGTPE]iB)", re.I)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50, "eib": 2**60}
HELPS = 0.01
"""A remedy that saves less than this share of the peak is none."""
REMEDIES = 3


@dataclass(frozen=True)
class Remedy:
    """A key to set: what to write, what it costs, and whether the run stays the same one."""

    key: str
    before: str
    after: Any
    costs: str
    same_run: bool = True

    def described(self, saved: int | None) -> str:
        """For example `micro_batch_size 16 -> 8: about 10.20 GB less; the global batch stays`."""
        less = "" if saved is None else f" about {saved / 1e9:.2f} GB less;"
        return f"{self.key} {self.before} -> {json.dumps(self.after)}:{less} {self.costs}"


@contextmanager
def explain_allocation_errors(
    parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> Iterator[None]:
    """While open, an error of an allocator becomes a UserError with advice; what the failed step held is let go first.

    Each rank explains its own; the others leave with their next collective.
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
    """Whether `error` says that there was no memory left, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(SIGNS.search(str(error)))


def requested_bytes(text: str) -> int | None:
    """The bytes that the allocator whose error says `text` was asked for, None where it does not say."""
    found = ASKED.search(text)
    return round(float(found[1]) * UNITS[found[2].lower()]) if found else None


def out_of_memory_error(
    text: str, parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> UserError:
    """What to tell the user of an allocator's error that says `text`."""
    asked = requested_bytes(text)
    more = "" if asked is None else f": {asked / 1e9:.2f} GB more were asked for"
    device = "a GPU" if context.device.type == "cuda" else "this machine"
    said = [f"rank {context.rank}: {device} is out of memory{more}."]
    share = _share(parameters, context)
    candidates = list(remedies(parameters, share, context.world_size))
    try:
        said += _measured(candidates, parameters, vocabulary, context)
    except (RuntimeError, MemoryError, UserError) as error:  # the advice must not hide what it is about
        said.append(f"It could not be estimated what takes it ({type(error).__name__}). What may help:")
        said += [f"  {each.described(None)}" for each in candidates[:REMEDIES]]
    said.append("See all of it with `terakoya estimate PARAMETERS.json`; checkpoints that were written are whole.")
    return UserError("\n".join(said))


def remedies(parameters: Parameters, share: RankBatch, world_size: int) -> Iterator[Remedy]:
    """What can be changed, in the order in which it changes the run."""
    if share.micro_batch_size > 1:
        before = "null" if parameters.micro_batch_size is None else str(parameters.micro_batch_size)
        shown = f"{before} (here {share.micro_batch_size})" if before == "null" else before
        costs = "the global batch stays, in more micro-steps"
        yield Remedy("micro_batch_size", shown, (share.micro_batch_size + 1) // 2, costs)
    if parameters.activation_checkpointing != "full":
        before = json.dumps(parameters.activation_checkpointing)
        yield Remedy("activation_checkpointing", before, "full", "blocks are computed again, about a third more work")
    head_positions = getattr(parameters.objective, "head_positions", 0)
    positions = share.micro_batch_size * parameters.data.sequence_length
    if head_positions != 0 and (head_positions or positions) > 256:
        after = max(256, (head_positions or positions) // 8)
        yield Remedy("objective.head_positions", json.dumps(head_positions), after, "the head is computed twice")
    if parameters.precision == "fp32":
        yield Remedy("precision", '"fp32"', "bf16", "products in bfloat16, weights stay float32", same_run=False)
    stage = parameters.parallel.zero_stage or 0
    if world_size > 1 and stage < 3:
        before = json.dumps({"engine": parameters.parallel.engine, "zero_stage": parameters.parallel.zero_stage})
        after_parallel = {"engine": "deepspeed", "zero_stage": 3 if stage else 2}
        yield Remedy("parallel", before, after_parallel, "processes share what each of them holds now; more traffic")
    if parameters.data.sequence_length >= 32:
        length = parameters.data.sequence_length
        costs = "rows are shorter: another run"
        yield Remedy("data.sequence_length", str(length), length // 2, costs, same_run=False)


def _measured(
    candidates: list[Remedy], parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> list[str]:
    """What takes the memory, and the remedies that save most, those first that leave the run what it is."""
    peak, parts, moment = _peak(parameters, vocabulary, context)
    part, most = max(parts.items(), key=lambda each: each[1])
    said = [
        f"By the estimate a step takes {peak / 1e9:.2f} GB of tensors at its peak, in the {moment}, most of it "
        f"{part}: {most / 1e9:.2f} GB ({100 * most / peak:.0f} %)."
    ]
    helpful: list[tuple[int, Remedy]] = []
    for each in candidates:
        if sum(remedy.same_run for _, remedy in helpful) >= REMEDIES and not each.same_run:
            continue
        try:
            changed = Parameters.from_dict(
                parameters.dump(), source="", overrides=[f"{each.key}={json.dumps(each.after)}"]
            )
            saved = peak - _peak(changed, vocabulary, context)[0]
        except UserError:  # what the other settings exclude
            continue
        if saved > HELPS * peak:
            helpful.append((saved, each))
    helpful.sort(key=lambda pair: (not pair[1].same_run, -pair[0]))
    best = sorted(helpful[:REMEDIES], key=lambda pair: -pair[0])
    if not best:
        return [*said, "Nothing that can be set saves much of it: take a smaller model, or more memory."]
    return [*said, "What helps, most effective first:", *(f"  {each.described(saved)}" for saved, each in best)]


def _share(parameters: Parameters, context: DistributedContext) -> RankBatch:
    """What this rank takes of each batch."""
    redistribute = parameters.on_lost_node == "redistribute"
    by_rank = rank_batches(
        parameters.batch_size, parameters.micro_batch_size, context.topology, redistribute=redistribute
    )
    return by_rank[context.rank]


def _peak(
    parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext
) -> tuple[int, dict[str, int], str]:
    """The bytes of tensors that each rank holds at the peak, by part too, and when that is."""
    from terakoya.estimation.estimate import measure
    from terakoya.estimation.fake_step import model_sizes

    share = _share(parameters, context)
    held = model_sizes(parameters, vocabulary, context=float(parameters.data.sequence_length))
    memory, _, _ = measure(
        parameters, vocabulary, share, held, processes=context.world_size, gpu=context.device.type == "cuda"
    )
    return memory.peak, dict(memory.parts), memory.moment
