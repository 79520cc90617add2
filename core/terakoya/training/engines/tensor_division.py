"""Divides the blocks and the vocabulary of models among the processes of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.architectures import attention
from terakoya.training.engines.tensor_layers import TensorDivision, TensorParallelGroup, partition_blocks
from terakoya.training.engines.vocabulary_layers import divide_vocabulary
from terakoya.training.model.adapted_layers import drops_inputs
from terakoya.training.model.module_parts import architecture_of, top_level_models

KEY = "parallel.tp_size"


def divide_models(
    module: nn.Module,
    architectures: Sequence[Architecture],
    vocabulary: Vocabulary,
    group: TensorParallelGroup,
    device: torch.device,
) -> TensorDivision:
    """Divides every model in `module` among the processes of `group`, which compute on `device`."""
    drops = attention.dropout(module) > 0 or drops_inputs(module)
    division, block_count = TensorDivision(), 0
    models, divides_vocabulary = list(top_level_models(module)), True
    for model in models:
        architecture = architecture_of(model, architectures, vocabulary, key=KEY)
        partition, blocks = architecture.tensor_partition(), architecture.blocks(model)
        assert partition is not None, "checked when the parameters are read"
        drops_here = drops or group.sequence_parallel or any(getattr(architecture, key) for key in partition.dropouts)
        partition_blocks(blocks, partition, group, division, dropout=device if drops_here else None, first=block_count)
        block_count += len(blocks)
        divides_vocabulary &= partition.vocabulary
    if divides_vocabulary:  # after the blocks of all: models may share embeddings
        divide_vocabulary(module, models, group, division)
    return division
