"""Runs one optimizer step on tensors with shapes and without data, and records what is live, and when.

The module, the engine and the micro-batch are those of training, so everything that changes a run's memory (activation
checkpointing, a head computed in parts, a plugin's own model) changes the estimate too. The operations are
those of a CPU; with `gpu`, attention with dropout keeps no scores, like a GPU's kernels, and attention may be flash.

See docs/design/estimation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terakoya.checking.fake_tensors import KnownValues, fake_tensors, full_batch, number_of_layers, with_depth
from terakoya.components import Architecture, ModuleBuild, Optimizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.deepspeed import PERSISTENCE_THRESHOLD
from terakoya.config.parallel import Parallel
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.attributes import replace_attribute
from terakoya.training.engines import build as engines
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.tensor_shards import whole_names
from terakoya.training.loss import weighted_loss
from terakoya.training.model.build import build_module_for_training
from terakoya.training.model.module_parts import count_weights, saved_values
from terakoya.training.model.transforms import find_transforms, transform
from terakoya_planning.memory_tracker import BATCH, CAST_WEIGHTS, GRADIENTS, OPTIMIZER, WEIGHTS, MemoryTracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEPTHS = (2, 4)
"""A deeper model runs with these numbers of layers; its own depth is extrapolated, because layers are equal."""
FORWARD, BACKWARD, LATE_BACKWARD, STEP = "forward", "backward", "backward, second half", "optimizer step"


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a module and of its saved state.

    Attributes:
        parameters, trained, embeddings: elements, each counted once.
        blocks, largest_block: elements of all blocks together, and of the largest; 0 without blocks.
        largest: elements of the largest trained parameter.
        small: elements of the parameters that ZeRO's stage 3 keeps whole because they are small.
        seen_whole: elements of each trained parameter that the optimizer must see whole.
        flops_per_token: forward and backward of one real token.
        saved_bytes: weights and buffers in a checkpoint's `state/`.
        model_bytes: exported models, in `model/`.
    """

    parameters: int
    trained: int
    embeddings: int
    blocks: int
    largest_block: int
    largest: int
    small: int
    flops_per_token: float
    saved_bytes: int
    model_bytes: int
    seen_whole: tuple[int, ...] = ()


@dataclass(frozen=True)
class Simulation:
    """Memory of a step in one process that holds all weights.

    Attributes:
        windows: window of the step (forward, ...) -> bytes by part of memory, at the window's peak.
        optimizer_bytes: the optimizer's state.
        batch_bytes: one micro-batch on the host.
        depths: the numbers of layers that were run; empty if the model was run with its own depth.
        on_host: the most activations that wait on the host.
    """

    windows: Mapping[str, Mapping[str, int]]
    optimizer_bytes: int
    batch_bytes: int
    depths: tuple[int, ...]
    on_host: int = 0


def model_sizes(parameters: Parameters, vocabulary: Vocabulary, *, context: float) -> ModelSizes:
    """Returns the sizes of the module of `parameters`, without allocating weights."""
    with fake_tensors(KnownValues):
        module = _module(parameters, vocabulary)
        tables = {id(each.weight): each.weight for each in module.modules() if isinstance(each, nn.Embedding)}
        exported = parameters.objective.exports(module)
        blocks = [block for model in exported.values() for block in _blocks(parameters.architecture, model)]
        block_sizes = [sum(each.numel() for each in block.parameters()) for block in blocks]
        models = [{id(each): each for each in model.parameters()}.values() for model in exported.values()]
        return ModelSizes(
            parameters=count_weights(module),
            trained=sum(each.numel() for each in module.parameters() if each.requires_grad),
            embeddings=sum(each.numel() for each in tables.values()),
            blocks=sum(block_sizes),
            largest_block=max(block_sizes, default=0),
            largest=max((each.numel() for each in module.parameters() if each.requires_grad), default=0),
            small=sum(each.numel() for each in module.parameters() if each.numel() < PERSISTENCE_THRESHOLD),
            flops_per_token=parameters.objective.flops_per_token(module, parameters.architecture, context=context),
            saved_bytes=sum(value.numel() * value.element_size() for _, value in saved_values(module)),
            model_bytes=sum(each.numel() * each.element_size() for model in models for each in model)
            + 4 * (count_weights(module) - sum(each.numel() for each in module.parameters())),
            seen_whole=_seen_whole(parameters.optimizer, module),
        )


def _seen_whole(optimizer: Optimizer, module: nn.Module) -> tuple[int, ...]:
    """The elements of each parameter of `module` that `optimizer` must see whole."""
    sizes = {id(each): (name, each.numel()) for name, each in module.named_parameters()}
    names = {key: name for key, (name, _) in sizes.items()}
    whole = whole_names(optimizer, optimizer.build(module, fused=False).param_groups, names)
    return tuple(size for name, size in sizes.values() if name in whole)


def _blocks(architecture: Architecture, model: PreTrainedModel) -> Sequence[nn.Module]:
    """The blocks of `model`; none if `architecture` does not define them."""
    try:
        return architecture.blocks(model)
    except (NotImplementedError, AttributeError):  # a second model may be of another type
        return ()


def simulate_step(
    parameters: Parameters,
    vocabulary: Vocabulary,
    *,
    rows: int,
    gradients_stay: bool,
    gpu: bool = False,
    documents_per_row: float | None = None,
    divide: Callable[[nn.Module], None] | None = None,
) -> Simulation:
    """Simulates one optimizer step of `rows` rows in a process that holds all weights.

    Args:
        gradients_stay: gradients of earlier micro-steps, or the buckets that hold them, exist from the start.
        gpu: the process has a GPU.
        documents_per_row: for a run that may take flash attention, whose memory depends on it; None: attention is not
            flash.
        divide: leaves a module one process's part of the weights.
    """
    run = partial(
        _simulate, vocabulary=vocabulary, rows=rows, gradients_stay=gradients_stay, gpu=gpu,
        documents_per_row=documents_per_row, divide=divide,
    )  # fmt: skip
    smaller = [with_depth(parameters, depth) for depth in DEPTHS]
    layers = number_of_layers(parameters.architecture)
    if layers <= DEPTHS[-1] or None in smaller:
        return run(parameters)
    less, more = (run(each) for each in smaller if each is not None)
    factor = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def extrapolate(first: int, second: int) -> int:
        return max(0, round(first + (second - first) * factor))

    windows = {}
    for name, parts in more.windows.items():
        fewer = less.windows[name]
        windows[name] = {part: extrapolate(fewer.get(part, 0), parts.get(part, 0)) for part in {**fewer, **parts}}
    optimizer_bytes = extrapolate(less.optimizer_bytes, more.optimizer_bytes)
    on_host = extrapolate(less.on_host, more.on_host)
    return Simulation(windows, optimizer_bytes, less.batch_bytes, depths=DEPTHS, on_host=on_host)


def _module(parameters: Parameters, vocabulary: Vocabulary) -> nn.Module:
    """Returns the module as it is trained."""
    module = build_module_for_training(parameters, vocabulary)
    # peft moves what it adds to where the layer under it is: torch swaps tensors without data, which it cannot while
    # they are watched
    with replace_attribute(nn.Module, "to", lambda each, *_, **__: each):
        transform("adapt", module, ModuleBuild(parameters, vocabulary))
    module.to = lambda *_, **__: module  # type: ignore[method-assign] # moving it would need data
    return module


def keeps_bf16(parameters: Parameters) -> bool:
    """Whether layers of a run read weights in bf16, their copies or as they are gathered, and not under autocast."""
    return any(each.stage == "engine" for each in find_transforms(parameters).values())


def _simulate(
    parameters: Parameters,
    *,
    vocabulary: Vocabulary,
    rows: int,
    gradients_stay: bool,
    gpu: bool,
    documents_per_row: float | None,
    divide: Callable[[nn.Module], None] | None,
) -> Simulation:
    # the precision of what is kept is that of the run's own engine
    alone = parameters.model_copy(update={"parallel": Parallel(), "autocast": not keeps_bf16(parameters)})
    device = torch.device("cpu")
    context = DistributedContext(0, 1, device, Topology((ProcessInfo(0, 0, 0, ""),)), None, None)
    # kernels of a GPU for several documents in a row keep as much as for one long one
    batch, tensors = full_batch(parameters, vocabulary, rows=rows, whole_rows=gpu)
    with fake_tensors(partial(MemoryTracker, vocabulary_size=vocabulary.size)) as tracker:
        module = _module(alone, vocabulary)
        flash = documents_per_row is not None and gpu and _takes_flash(parameters, module)
        if documents_per_row is not None and flash:
            tensors |= _boundary_tensors(rows, parameters.data.sequence_length, documents_per_row)
        attention.use(module, "flash" if flash else "eager" if parameters.attention == "eager" else "sdpa")
        module.train()
        if divide is not None:
            divide(module)
        tracker.assign([*module.parameters(), *module.buffers()], WEIGHTS)
        models = parameters.objective.exports(module).values()
        tracker.expect_casts(
            weight for model in models for block in _blocks(parameters.architecture, model)
            for weight in block.parameters()
        )  # fmt: skip
        run = ModuleBuild(alone, vocabulary, context, on_host=tracker.on_host)
        engine = engines.build(module, run, micro_steps=1, micro_batch_size=rows)
        transform("compile", module, run)
        assert isinstance(engine, DDPEngine), "engine_memory accounts for several processes"
        for copies in engine.copies:
            tracker.assign(copies.copies, CAST_WEIGHTS)
        trained = [each for each in module.parameters() if each.requires_grad]
        tracker.enter(STEP, others=OPTIMIZER)
        for each in trained:
            each.grad = torch.zeros_like(each)
            tracker.assign([each.grad], GRADIENTS)
        engine.step(parameters.optimizer.learning_rate)
        state = [value for each in engine.optimizer.state.values() for value in each.values()]
        state_tensors = [value for value in state if isinstance(value, torch.Tensor)]
        tracker.assign(state_tensors, OPTIMIZER)
        for each in trained:
            if gradients_stay:
                each.grad = torch.zeros_like(each)
                tracker.assign([each.grad], GRADIENTS)
        _watch_gradients(tracker, trained)
        tracker.enter(FORWARD)
        inputs = tracker.take(tensors)
        tracker.assign(inputs.values(), BATCH)
        loss_fn = partial(weighted_loss, terms=parameters.objective.terms(), counts=batch.counts)

        def loss_and_enter_backward(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
            loss = loss_fn(sums)
            tracker.enter(BACKWARD)
            return loss

        with _no_scores() if gpu else nullcontext():
            engine.micro_step(inputs, loss_and_enter_backward, last=True)
        optimizer_bytes = sum(value.numel() * value.element_size() for value in state_tensors)
    batch_bytes = sum(array.nbytes for array in batch.arrays.values())
    del tracker.peaks[""]  # the time before the step
    return Simulation(tracker.peaks, optimizer_bytes, batch_bytes, depths=(), on_host=tracker.most_on_host)


def _takes_flash(parameters: Parameters, module: nn.Module) -> bool:
    """Whether a run of `module` on a GPU attends with flash."""
    facts = attention.find_facts(module, parameters.precision, parameters.architecture.document_masking)
    length, gpu = parameters.data.sequence_length, torch.device("cuda")
    if parameters.attention == "flash":
        return not attention.why_not_flash(device=gpu, **facts)
    return attention.choose(parameters.attention, device=gpu, length=length, **facts) == "flash"


def _boundary_tensors(rows: int, length: int, documents_per_row: float) -> dict[str, Tensor]:
    """Returns tensors with the shapes of `attention.boundary_arrays` for `rows` rows of `length` positions."""
    room = attention.room_for(math.ceil(rows * documents_per_row), rows * length)
    starts = np.minimum(np.arange(room + 1), rows) * length
    return {
        "cu_seqlens": torch.from_numpy(starts.astype(np.int32)),
        attention.LONGEST_DOCUMENT: torch.empty((length, 0), dtype=torch.int32),
    }


def _watch_gradients(tracker: MemoryTracker, trained: list[nn.Parameter]) -> None:
    """Adds hooks to all trained weights that assign their gradients to `GRADIENTS`, and that begin the window of the
    second half of the backward when half of the gradients are there."""
    arrived = 0

    def assign_gradient(parameter: torch.Tensor) -> None:
        nonlocal arrived
        arrived += 1
        assert parameter.grad is not None, "the hook runs after accumulation"
        tracker.assign([parameter.grad], GRADIENTS)
        if arrived == len(trained) // 2:
            tracker.enter(LATE_BACKWARD)

    for each in trained:
        each.register_post_accumulate_grad_hook(assign_gradient)


def _no_scores() -> AbstractContextManager[None]:
    """While open, fused attention has no dropout: only on a CPU dropout makes it keep all scores.

    The function is replaced, since a mode of torch would not be seen by a backward that recomputes a block.
    """
    fused = F.scaled_dot_product_attention

    def without_dropout(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        return fused(query, key, value, attn_mask, 0.0, **named)

    return replace_attribute(F, "scaled_dot_product_attention", without_dropout)
