"""Activation checkpointing (Chen et al., 2016, arXiv:1604.06174): blocks are computed again for their gradient, so that
less of them stands in memory until then. It changes memory and time, and no number.

`full` keeps what goes into each block. `selective` keeps beside it what is dear to compute:

- the results of matrix products with weights: of every linear layer;
- the results of torch's fused attention, where it draws no dropout;
- of attention that is written out in products of batches of matrices, all but the scores (a row's positions squared,
  more numbers than they are made of), which are computed again as Megatron-LM's selective recomputation does
  (Korthikanti et al., 2022, arXiv:2205.05198).

All else is computed again: norms, activations, dropout, softmax, additions, casts, and of what is named here whatever a
block changes in place. What draws random numbers always is, in the same order from the same state of the generator, so
dropout drops the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.training.model.module_parts import architecture_of, top_level_models

Kind = Literal["full", "selective"]

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"})
"""Matrix products as linear layers make them."""
BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
"""Products of batches of matrices, as attention that is written out makes them."""
ATTENTION = ("aten::_scaled_dot_product_", "torch_attn::_varlen_attn")
"""What the names of fused attention begin with."""


def apply_activation_checkpointing(parameters: Parameters, module: nn.Module, vocabulary: Vocabulary) -> None:
    """Lets the blocks of every model in `module` be computed again in the backward, as `parameters` say; without
    `activation_checkpointing` does nothing. Names of weights stay, forwards are wrapped.

    Raises:
        UserError: no architecture of `parameters` says where a model's blocks are.
    """
    kind = parameters.activation_checkpointing
    if kind is None:
        return
    for model in top_level_models(module):
        architecture = architecture_of(parameters, model, vocabulary, key="activation_checkpointing")
        for block in architecture.blocks(model):
            checkpoint_block(block, kind)


def checkpoint_block(block: nn.Module, kind: Kind) -> None:
    """Lets `block` be computed again in the backward, wholly (`full`) or without what is dear (`selective`)."""
    again = _Full(block.forward) if kind == "full" else _Selective(block.forward)
    block.forward = update_wrapper(again, block.forward)


class _Full:
    """A block's forward, of which nothing is kept. Copied with its block it is the copy's: `forward` is bound."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the block returns."""
        if not torch.is_grad_enabled():
            return self.forward(*arguments, **named)
        return self.run(*arguments, **named)

    def run(self, *arguments: Any, **named: Any) -> Any:
        """The forward, with a gradient wanted. Random numbers are drawn again from the state they were drawn from."""
        return checkpoint(self.forward, *arguments, use_reentrant=False, **named)


class _Selective(_Full):
    """A block's forward, of which what is dear is kept.

    What the block itself changes later, in place, must not be: kept, it would be changed once more. Which of the
    results these are is seen while the block runs for the first time; it then runs once more, from the same state of
    the random generators.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.changed: set[int] | None = None  # the numbers, in the order in which they are made, of such results

    def run(self, *arguments: Any, **named: Any) -> Any:
        """The forward, with a gradient wanted."""
        if self.changed is not None:
            return self._keep(_Choice(self.changed), *arguments, **named)
        states = torch.get_rng_state(), get_device_states(*arguments, *named.values())
        first = _Choice(set())
        made = self._keep(first, *arguments, **named)
        self.changed = first.changed
        if not first.changed:
            return made
        torch.set_rng_state(states[0])
        set_device_states(*states[1])
        return self.run(*arguments, **named)

    def _keep(self, choice: _Choice, *arguments: Any, **named: Any) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, choice)
        return checkpoint(self.forward, *arguments, use_reentrant=False, context_fn=contexts, **named)


class _Choice:
    """Which results of one run of a block's forward are kept: the policy that torch asks for each operation.

    Attributes:
        changed: the numbers of results that would be kept but are changed in place: those given and those seen.
    """

    def __init__(self, changed: set[int]) -> None:
        self.changed = set(changed)
        self.made = {False: 0, True: 0}  # how many were dear so far, in the first run and when it is repeated
        self.kept: dict[int, int] = {}  # the number of the result that lies at an address

    def __call__(
        self, context: SelectiveCheckpointContext, operation: Any, *arguments: Any, **named: Any
    ) -> CheckpointPolicy:
        """Whether the result of `operation`, called with `arguments`, is kept."""
        if not isinstance(operation, torch._ops.OpOverload):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operation._schema.is_mutable:
            self._see_changes(operation, arguments, named)
        if not is_expensive(operation, arguments, named):
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = self.made[context.is_recompute]
        self.made[context.is_recompute] += 1
        if number in self.changed:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            made = context.op_output if isinstance(context.op_output, tuple) else (context.op_output,)
            self.kept |= {_address(each): number for each in made if isinstance(each, torch.Tensor) and each.numel()}
        return CheckpointPolicy.MUST_SAVE

    def _see_changes(self, operation: torch._ops.OpOverload, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        for each in operation._schema.arguments:
            if each.alias_info is None or not each.alias_info.is_write:
                continue
            value = _given(operation, arguments, named).get(each.name)
            if isinstance(value, torch.Tensor) and value.numel() and _address(value) in self.kept:
                self.changed.add(self.kept[_address(value)])


def is_expensive(operation: torch._ops.OpOverload, arguments: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether `selective` keeps what `operation` makes of `arguments`, unless it is changed in place later."""
    name = operation.name().partition(".")[0]
    if name in BATCHED:
        first, second = arguments[-2:]  # (n, I, K), (n, K, J)
        return bool(first.shape[0] * first.shape[1] * second.shape[2] <= first.numel() + second.numel())
    if name.startswith(ATTENTION):
        # kept, it would draw nothing the second time, and all dropout behind it would draw other numbers
        given = _given(operation, arguments, named)
        return not any(given.get(each) for each in ("dropout_p", "dropout"))
    return name in PRODUCTS


def _given(operation: torch._ops.OpOverload, arguments: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """All that `operation` is called with, by name."""
    names = [each.name for each in operation._schema.arguments]
    return {**dict(zip(names, arguments, strict=False)), **named}


def _address(tensor: torch.Tensor) -> int:
    """What tells the memory of `tensor`, or what it is a view of, from others', tensors without data too."""
    return tensor.untyped_storage()._cdata
