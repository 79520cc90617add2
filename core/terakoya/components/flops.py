"""Floating point operations of training a Transformer, for one real token: the necessary work, however it is computed.

    6 x weights of the body + 12 x attention's width x context, summed over layers + 6 x share x weights of the head

Forward and backward of a product take 6 operations a weight; those of scores and weighted values take 12 a channel and
visible position (Kaplan et al., 2020, arXiv:2001.08361; Chowdhery et al., 2022, arXiv:2204.02311, appendix B).

Of the 6, the product, the gradient of its input and the gradient of the weights take 2 each. A frozen weight takes 4,
as it needs no gradient itself. Where no weight before it is trained either, no gradient passes, and it takes 2; scores
and weighted values then take 4. The order of modules decides which weights come before which, and a block counts as one
module: the whole lowest block with a trained weight is counted as if a gradient passed.

Padding, unused logits and the recomputation of activation checkpointing are not necessary work and are not counted. Nor
are embeddings, norms and softmaxes, which are not matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WINDOWS = ("local_attention", "sliding_window")
"""The keys of Transformers' configs for the number of positions that a layer of `layer_types` "sliding_attention" sees.
Where a config has both, as ModernBERT's, the second is one side of the first."""


PACKED = "packed_elements"
"""The attribute of a module with the elements of its matrix, where that is frozen and no parameter."""


def per_token(
    model: PreTrainedModel,
    blocks: Sequence[torch.nn.Module],
    *,
    context: float,
    head_share: float = 1.0,
    causal: bool | None = None,
) -> float:
    """Returns the operations of forward and backward for one real token of `model`, from its weights and its config.

    In an encoder-decoder each token is assumed to pass one of the two halves (Raffel et al., 2020, section 3.2.2). A
    mixture of experts, which does not use all its weights for a token, needs a count of its own.

    Args:
        model: the model with all its weights, on any device, also `meta`; weights with `requires_grad` are trained.
        blocks: its repeated blocks, empty where they are not known. If there are fewer than the config's layers, each
            is used several times, as in ALBERT.
        context: positions of its own document that a position sees, on average, if it sees both sides: `mean_context`.
        head_share: share of the positions at which the head is run.
        causal: whether a position sees only the positions before it, half of `context`; None takes the answer from the
            model's class.
    """
    config = model.config
    halves = bool(getattr(config, "is_encoder_decoder", False))
    causal = model.can_generate() and not halves if causal is None else causal
    layers = getattr(config, "num_hidden_layers", None) or len(blocks)
    repeated = max(1.0, layers / len(blocks)) if blocks else 1.0
    block_of = {id(module): block for block in blocks for module in block.modules()}
    body, head, passes = 0.0, 0.0, False
    trained: set[int] = set()  # blocks that a gradient passes
    outside = _head_modules(model)
    unused = _unused_modules(model)
    for module in model.modules():
        block = block_of.get(id(module))
        whole = module.parameters(recurse=False) if block is None else block.parameters()
        passes = passes or any(weight.requires_grad for weight in whole)
        if passes and block is not None:
            trained.add(id(block))
        work = 0 if id(module) in unused else _work(module, passes=passes)
        if id(module) in outside:
            head += work
        else:
            body += work * (1.0 if block is None else repeated)
    seen = sum(
        _visible_positions(config, layer, context / 2 if causal else context)
        * _attention_work(blocks, layer, layers, trained)
        for layer in range(layers)
    )
    return body * (0.5 if halves else 1.0) + _attention_width(config) * seen + head_share * head


def mean_context(document_ids: np.ndarray) -> float:
    """Returns the mean length of a position's own document over the real positions of `document_ids` (B, T), -1 for
    padding: sum of squared lengths / sum of lengths."""
    width = document_ids.shape[1]
    rows = np.arange(len(document_ids))[:, None] * (width + 1)
    _, lengths = np.unique((rows + document_ids)[document_ids >= 0], return_counts=True)
    return float((lengths.astype(np.float64) ** 2).sum() / max(1, lengths.sum()))


def _head_modules(model: PreTrainedModel) -> set[int]:
    """Returns the ids of the modules that turn hidden states into predictions."""
    base = model.base_model
    if base is not model:
        return {id(each) for each in model.modules()} - {id(each) for each in base.modules()}
    output = model.get_output_embeddings()
    return set() if output is None else {id(each) for each in output.modules()}


def _unused_modules(model: PreTrainedModel) -> set[int]:
    """Returns the ids of the modules that a token does not pass: a pooler, which reads one position of a row, and the
    original of a module that peft trains as a copy."""
    pooler = getattr(model.base_model, "pooler", None)
    parts = [] if pooler is None else [pooler]
    parts += [each.original_module for each in model.modules() if hasattr(each, "modules_to_save")]
    return {id(each) for part in parts for each in part.modules()}


def _work(module: torch.nn.Module, *, passes: bool) -> int:
    """Returns the operations with the matrices of `module` itself: the product, the gradient of its input where one
    `passes`, and the gradient of the weights where they are trained."""
    from torch import nn

    if isinstance(module, nn.Embedding):
        return 0
    matrices = [weight for weight in module.parameters(recurse=False) if weight.ndim >= 2]
    packed = 2 * getattr(module, PACKED, 0) * (1 + passes)
    return packed + sum(2 * weight.numel() * (1 + passes + weight.requires_grad) for weight in matrices)


def _attention_work(blocks: Sequence[torch.nn.Module], layer: int, layers: int, trained: set[int]) -> float:
    """Returns the operations of scores and weighted values, for one channel and visible position, in layer number
    `layer` of `layers`: 12, or 4 where no gradient passes; the mean over the blocks at that depth."""
    if not blocks:
        return 12.0
    first = layer * len(blocks) // layers
    at_depth = blocks[first : max(first + 1, (layer + 1) * len(blocks) // layers)]
    return sum(12.0 if id(block) in trained else 4.0 for block in at_depth) / len(at_depth)


def _attention_width(config: object) -> int:
    """Returns heads x the size of a head, or the width of hidden states where the config does not have these."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", 0)
    head_size = getattr(config, "head_dim", None)
    return heads * head_size if isinstance(heads, int) and isinstance(head_size, int) else hidden


def _visible_positions(config: object, layer: int, context: float) -> float:
    """Returns how many positions a position sees in layer number `layer`, at most `context`."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None or kinds[layer] != "sliding_attention":
        return context
    window = next((value for name in WINDOWS if (value := getattr(config, name, None)) is not None), None)
    return context if window is None else min(context, window)
