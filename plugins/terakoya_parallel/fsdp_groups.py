"""Which processes share weights under `fully_shard`, and which weights are gathered together, in which precision.

See docs/design/engines.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from terakoya.components import Architecture, Copies
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.training.engines.engine import autocast_dtype
from terakoya.training.model.module_parts import architecture_of, top_level_models

PRODUCTS = (nn.Linear, _ConvNd, Conv1D)
"""Modules whose weights and biases autocast casts; Transformers' `Conv1D` is GPT-2's linear layer."""


def shard_module(
    module: nn.Module,
    architectures: Sequence[Architecture],
    vocabulary: Vocabulary,
    mesh: DeviceMesh,
    *,
    precision: str,
    stays_gathered: bool = False,
    copies: Sequence[Copies] = (),
) -> list[FSDPModule]:
    """Shards `module` over `mesh` and moves it to the device, group by group; returns the groups, the root last. If
    `stays_gathered`, the blocks' weights stay gathered after a forward, as those of the root do. Weights that have
    `copies` are gathered in 16 bits, those of the root if all of its weights have.

    Raises:
        UserError: none of `architectures` defines a model's blocks, or a weight is a scalar.
    """
    for name, value in module.named_parameters():
        if value.ndim == 0:
            raise UserError(
                f'parallel.engine "fsdp": {name} is a scalar, which has no rows to shard; use engine "ddp", or make it '
                "a tensor of one element"
            )
    policy = MixedPrecisionPolicy()
    if (dtype := autocast_dtype(precision)) is not None:
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    blocks = shardable_blocks(module, architectures, vocabulary)
    low = {value for each in copies for value in each.weights}
    gathered_by_blocks: set[nn.Parameter] = set()
    for block in blocks:
        every = set(block.parameters())
        float32 = every - low if low else float32_weights(block) if policy.param_dtype else set()
        gathered_by_blocks |= every - float32
    # the root comes first, so that what blocks leave in float32 becomes a part of its group
    after_forward = not stays_gathered
    of_root = policy if low >= set(module.parameters()) - gathered_by_blocks else MixedPrecisionPolicy()
    root = fully_shard(module, mesh=mesh, mp_policy=of_root, ignored_params=gathered_by_blocks)
    groups = []
    for block in blocks:
        sharded: set[nn.Parameter] = {value for value in block.parameters() if isinstance(value, DTensor)}
        groups.append(
            fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=sharded, reshard_after_forward=after_forward)
        )
    for this, following in pairwise(groups):
        this.set_modules_to_forward_prefetch([following])
    for group in (*groups, root):
        # losses are parts of a global mean already, so gradients are summed and not averaged
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
        for each in copies:
            each.follow(cast("nn.Module", group), is_block=group is not root)
    return [*groups, root]


def float32_weights(block: nn.Module) -> set[nn.Parameter]:
    """The weights of `block` that autocast does not cast: those of embeddings, and vectors outside of products, such as
    a norm's."""
    return {
        value
        for module in block.modules()
        if not isinstance(module, PRODUCTS)
        for value in module.parameters(recurse=False)
        if value.ndim == 1 or isinstance(module, nn.Embedding)
    }


def shardable_blocks(
    module: nn.Module, architectures: Sequence[Architecture], vocabulary: Vocabulary
) -> list[nn.Module]:
    """The blocks of every model in `module`, each once, without those that share a weight with another module.

    Raises:
        UserError: none of `architectures` defines a model's blocks.
    """
    blocks = dict.fromkeys(
        block
        for model in top_level_models(module)
        for block in architecture_of(model, architectures, vocabulary, key='parallel.engine "fsdp"').blocks(model)
    )
    in_module = _occurrences(module).items()
    return [block for block in blocks if _occurrences(block).items() <= in_module]


def _occurrences(module: nn.Module) -> Counter[nn.Parameter]:
    """Returns how often each parameter of `module` occurs in it."""
    return Counter(value for _, value in module.named_parameters(remove_duplicate=False))


def local_values(value: Tensor) -> Tensor:
    """What this process holds of `value`, which may be sharded, in the same memory and detached from gradients."""
    with torch.no_grad():
        return (value.to_local() if isinstance(value, DTensor) else value).detach()
