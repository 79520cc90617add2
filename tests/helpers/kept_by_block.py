"""What autograd keeps for one block of a model, on one of several processes, of which the others are not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from terakoya.plugins import registry
from terakoya.toolkit.architectures import attention
from terakoya_contract.toy import VOCABULARY
from terakoya_parallel.tensor_layers import TensorDivision, TensorParallelGroup, partition_blocks

ROWS, POSITIONS, HIDDEN = 2, 16, 24
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.0},
    "llama": {"intermediate_size": 64, "num_key_value_heads": 2},
}


def settings(name: str) -> dict[str, Any]:
    """The settings of the architecture `name`."""
    shape = {"hidden_size": HIDDEN, "num_attention_heads": 4, "max_position_embeddings": POSITIONS}
    return {**shape, **SIZES[name]}


def kept_by_block(name: str, processes: TensorParallelGroup | None, *, sharing_keys: int = 1) -> float:
    """The numbers of a token of its own that autograd keeps for a block of the architecture `name` on one of
    `processes`, as a multiple of the hidden size. Weights and masks are not counted.

    Args:
        sharing_keys: processes that divide positions and gather keys and values.
    """
    architecture = registry().component("architectures", name)(num_hidden_layers=1, **settings(name))
    model = architecture.build(VOCABULARY, "causal")
    attention.use(model, "sdpa")
    (block,) = architecture.blocks(model)
    if processes is not None:
        partition_blocks([block], architecture.tensor_partition(), processes, TensorDivision(), dropout=None)
    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}
    own = POSITIONS // sharing_keys
    sizes_of: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights and value.shape[-2:] != (own, POSITIONS):
            sizes_of[storage.data_ptr()] = storage.nbytes()
        return value

    hooks = saved_tensors_hooks(note, lambda value: value)
    block.register_forward_pre_hook(lambda *_: hooks.__enter__(), prepend=True)
    block.register_forward_hook(lambda *_: hooks.__exit__())
    rows = torch.zeros(ROWS, own, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": rows + 5, "position_ids": rows + torch.arange(own)}
    if sharing_keys == 1:
        batch |= {"document_ids": rows, attention.WHOLE_ROWS: torch.empty(0)}
    else:
        batch |= {
            "document_ids": torch.zeros(ROWS, POSITIONS, dtype=torch.int64),
            attention.QUERIES: slice(0, own),
            attention.EXCHANGE: lambda attend, query, *keys: attend(
                query, *(torch.cat([each] * sharing_keys, dim=2) for each in keys)
            ),
        }
    architecture.hidden(model, batch).sum().backward()
    return sum(sizes_of.values()) / (4 * ROWS * own * HIDDEN)
