"""Activation checkpointing (Chen et al., 2016, arXiv:1604.06174): the backward recomputes a block's forward, so fewer
activations stay in memory until then. It changes memory and time, and no number.

`full` keeps only each block's input. `selective` keeps also the results that are expensive to compute:

- matrix products with weights, that is, the outputs of linear layers;
- the output of torch's fused attention, where it applies no dropout;
- of attention written as batched matrix products, everything but the scores (a row's positions squared, larger than
  their inputs), which are recomputed as in Megatron-LM's selective recomputation (Korthikanti et al., 2022,
  arXiv:2205.05198).

Everything else is recomputed: norms, activations, dropout, softmax, additions, casts, and any result listed above that
a block changes in place. Operations that draw random numbers are always recomputed, in the same order from the same
generator state, so dropout drops the same elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.training.model.module_parts import architecture_of, top_level_models

Kind = Literal["full", "selective"]

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"})
"""Matrix products of linear layers."""
BATCHED_PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm"})
"""Batched matrix products, as in attention without a fused kernel."""
FUSED_ATTENTION = ("aten::_scaled_dot_product_", "torch_attn::_varlen_attn")
"""Prefixes of the names of fused attention operations."""


def apply_activation_checkpointing(
    module: nn.Module, architectures: Sequence[Architecture], vocabulary: Vocabulary, kind: Kind | None
) -> None:
    """Makes the backward recompute the blocks of every model in `module`; None does nothing. Forwards are wrapped,
    names of weights do not change.

    Raises:
        UserError: none of `architectures` defines a model's blocks.
    """
    if kind is None:
        return
    for model in top_level_models(module):
        architecture = architecture_of(model, architectures, vocabulary, key="activation_checkpointing")
        for block in architecture.blocks(model):
            checkpoint_block(block, kind)


def checkpoint_block(block: nn.Module, kind: Kind) -> None:
    """Makes the backward recompute `block`: everything (`full`), or all but expensive results (`selective`)."""
    forward = _Full(block) if kind == "full" else _Selective(block)
    block.forward = update_wrapper(forward, block.forward)


class _Full:
    """A block's forward that keeps nothing. A deep copy of the block gets a deep copy of this: `forward` is bound."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.forward: Callable[..., Any] = block.forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Returns what the block returns. A block that is frozen like all below it has no backward and keeps nothing
        anyway; marked as one to compute again, the compiler would refuse its dropout."""
        given = (*arguments, *named.values(), *self.block.parameters())
        if not torch.is_grad_enabled() or not any(isinstance(each, Tensor) and each.requires_grad for each in given):
            return self.forward(*arguments, **named)
        return self.run(*arguments, **named)

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Runs the forward with gradients. The recomputation restores the random state of the first run."""
        return checkpoint(self.forward, *arguments, use_reentrant=False, **named)


class _Selective(_Full):
    """A block's forward that keeps expensive results.

    A result that the block itself later changes in place must not be kept, because the recomputation would change it a
    second time. The block's first run finds these results; the block then runs once more, from the same random state.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.changed: set[int] | None = None  # indices of such results, in the order of their computation

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Runs the forward with gradients."""
        if torch.compiler.is_compiling():  # the compiler's graphs change nothing in place
            contexts = partial(create_selective_checkpoint_contexts, keep_expensive)
            return checkpoint(self.forward, *arguments, use_reentrant=False, context_fn=contexts, **named)
        if self.changed is not None:
            return self._run_keeping(_Policy(self.changed), *arguments, **named)
        states = torch.get_rng_state(), get_device_states(*arguments, *named.values())
        first = _Policy(set())
        output = self._run_keeping(first, *arguments, **named)
        self.changed = first.changed
        if not first.changed:
            return output
        torch.set_rng_state(states[0])
        set_device_states(*states[1])
        return self.run(*arguments, **named)

    def _run_keeping(self, policy: _Policy, *arguments: Any, **named: Any) -> Any:
        # Autocast keeps the casts of weights. A recomputed block casts each weight that it uses, so its first run must
        # do so too, and not use the cast of a block before it.
        torch.clear_autocast_cache()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.forward, *arguments, use_reentrant=False, context_fn=contexts, **named)


class _Policy:
    """Decides which results of one run of a block's forward are kept; torch calls it for each operation.

    Attributes:
        changed: indices of expensive results that are changed in place: those given and those found in this run.
    """

    def __init__(self, changed: set[int]) -> None:
        self.changed = set(changed)
        self.expensive = {False: 0, True: 0}  # expensive results so far, in the first run and in the recomputation
        self.kept: dict[int, int] = {}  # address of a storage -> index of the result in it

    def __call__(
        self, context: SelectiveCheckpointContext, operation: Any, *arguments: Any, **named: Any
    ) -> CheckpointPolicy:
        """Whether the result of `operation`, called with `arguments`, is kept."""
        if not isinstance(operation, torch._ops.OpOverload):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operation._schema.is_mutable:
            self._note_changes(operation, arguments, named)
        if not is_expensive(operation, arguments, named):
            return CheckpointPolicy.PREFER_RECOMPUTE
        index = self.expensive[context.is_recompute]
        self.expensive[context.is_recompute] += 1
        if index in self.changed:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            results = context.op_output if isinstance(context.op_output, tuple) else (context.op_output,)
            self.kept |= {
                storage_of(each): index for each in results if isinstance(each, torch.Tensor) and each.numel()
            }
        return CheckpointPolicy.MUST_SAVE

    def _note_changes(self, operation: torch._ops.OpOverload, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        for argument in operation._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = _by_name(operation, arguments, named).get(argument.name)
            if isinstance(value, torch.Tensor) and value.numel() and storage_of(value) in self.kept:
                self.changed.add(self.kept[storage_of(value)])


def keep_expensive(_: SelectiveCheckpointContext, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Decides which results of a compiled block are kept: all expensive ones. The compiler calls it once for each
    operation of a graph."""
    if isinstance(operation, torch._ops.OpOverload) and is_expensive(operation, arguments, named):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def is_expensive(operation: torch._ops.OpOverload, arguments: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether `selective` keeps the result of `operation` with `arguments`, unless it is changed in place later."""
    name = operation.name().partition(".")[0]
    if name in BATCHED_PRODUCTS:
        first, second = arguments[-2:]  # (n, I, K), (n, K, J)
        return bool(first.shape[0] * first.shape[1] * second.shape[2] <= first.numel() + second.numel())
    if name.startswith(FUSED_ATTENTION):
        # if kept, it would draw no random numbers in the recomputation, and all later dropout would differ
        given = _by_name(operation, arguments, named)
        return not any(given.get(each) for each in ("dropout_p", "dropout"))
    return name in PRODUCTS


def _by_name(operation: torch._ops.OpOverload, arguments: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `operation`, by name."""
    names = [each.name for each in operation._schema.arguments]
    return {**dict(zip(names, arguments, strict=False)), **named}


def storage_of(tensor: torch.Tensor) -> int:
    """Identifies the storage of `tensor`, or of the tensor that it is a view of; works for tensors without data."""
    return tensor.untyped_storage()._cdata
