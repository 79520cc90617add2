"""Divides the blocks and the vocabulary of models among the processes of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.architectures import attention
from terakoya.training.engines.tensor_layers import TensorParallelGroup, partition_blocks, partly_applied
from terakoya.training.engines.tensor_shards import TensorPart
from terakoya.training.engines.vocabulary_layers import divide_vocabulary
from terakoya.training.model.adapted_layers import drops_inputs
from terakoya.training.model.module_parts import architecture_of, top_level_models

KEY = "parallel.tp_size"


@dataclass(frozen=True)
class TensorDivision:
    """How the layers of a module are divided.

    Attributes:
        parts: the part that this process has of each divided parameter.
        in_region: parameters that each process has whole and applies to its own part of the activations: their
            gradients must be summed.
    """

    parts: Mapping[nn.Parameter, TensorPart]
    in_region: Set[nn.Parameter]


def divide_models(
    module: nn.Module,
    architectures: Sequence[Architecture],
    vocabulary: Vocabulary,
    group: TensorParallelGroup,
    device: torch.device,
) -> TensorDivision:
    """Divides every model in `module` among the processes of `group`, which compute on `device`."""
    drops = attention.dropout(module) > 0 or drops_inputs(module)
    dropout = device if drops or group.sequence_parallel else None
    parts: dict[nn.Parameter, TensorPart] = {}
    in_region: set[nn.Parameter] = set()
    whole_vocabulary = False
    models, block_count = list(top_level_models(module)), 0
    for model in models:
        architecture = architecture_of(model, architectures, vocabulary, key=KEY)
        partition, blocks = architecture.tensor_partition(), architecture.blocks(model)
        assert partition is not None, "checked when the parameters are read"
        parts |= partition_blocks(blocks, partition, group, dropout=dropout, first=block_count)
        block_count += len(blocks)
        in_region |= partly_applied(blocks, partition, group, parts)
        whole_vocabulary |= not partition.vocabulary
    if not whole_vocabulary:  # models may share embeddings
        parts |= divide_vocabulary(module, models, group)
    return TensorDivision(parts, in_region)
