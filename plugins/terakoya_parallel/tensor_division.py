"""Divides the blocks and the vocabulary of models among the processes of a tensor-parallel group.

Blocks: `tensor_layers`. Of a vocabulary each process has some rows of the embeddings and of the vocabulary head
(Shoeybi et al., 2019, arXiv:1909.08053, section 3). It looks up the ids of its own part, and the results are added up.
The head returns the logits of that part to an objective that asks for them (`padded_head`), whose cross entropy then
exchanges three numbers a row (`toolkit/objectives/cross_entropy.py`); any other objective receives the logits of all
parts. Parts differ by one row where the vocabulary cannot be divided evenly. Weights that are tied stay tied.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.distributed.topology import split_evenly
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.objectives.columns import VocabularyPart
from terakoya.toolkit.objectives.padded_head import PART
from terakoya.training.model.module_parts import architecture_of, top_level_models
from terakoya_parallel import fp8_scales
from terakoya_parallel.adapted_layers import drops_inputs
from terakoya_parallel.tensor_layers import TensorDivision, TensorParallelGroup, enter_at, partition_blocks

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


def divide_vocabulary(
    module: nn.Module, models: Iterable[PreTrainedModel], group: TensorParallelGroup, division: TensorDivision
) -> None:
    """Keeps this process's rows of the embeddings and heads of `models`, which are in `module`, and inserts the
    communication. A divided parameter keeps its names and is a new object. The rows are added to the `division`."""
    divided: dict[nn.Parameter, nn.Parameter] = {}
    done: set[nn.Module] = set()
    for model in models:
        size = model.config.vocab_size
        first, last = split_evenly(size, group.size, group.index)
        of_process = VocabularyPart(first, last - first, size, group)
        for layer in [each for each in _vocabulary_layers(model) if each not in done]:
            done.add(layer)
            for whole in layer.parameters(recurse=False):
                divided[whole] = division.divide(whole, 0, group)
            if isinstance(layer, nn.Embedding):
                _look_up_part(layer, of_process, group)
            else:
                _score_part(layer, of_process, group)
                setattr(model.get_output_embeddings(), PART, of_process)
    for owner in module.modules():
        for name, value in list(owner.named_parameters(recurse=False)):
            if value in divided:
                setattr(owner, name, divided[value])


def _vocabulary_layers(model: PreTrainedModel) -> Iterable[nn.Embedding | nn.Linear]:
    """Yields the layers of `model` whose weights have a row for each id: with adapters (LoRA) there may be several in
    the place of the embeddings or of the head."""
    size = model.config.vocab_size
    words: nn.Module | None = model.get_input_embeddings()
    for each in words.modules() if words is not None else ():
        if isinstance(each, nn.Embedding) and each.num_embeddings == size:
            yield each
    head: nn.Module | None = model.get_output_embeddings()
    for each in head.modules() if head is not None else ():
        if isinstance(each, nn.Linear) and each.out_features == size:
            yield each


def _look_up_part(embedding: nn.Embedding, part: VocabularyPart, group: TensorParallelGroup) -> None:
    embedding.num_embeddings = part.count
    if embedding.padding_idx is not None:
        own = embedding.padding_idx - part.first
        embedding.padding_idx = own if 0 <= own < part.count else None

    def look_up(input_ids: Tensor) -> Tensor:
        """Returns the embeddings (..., H) of `input_ids` (...), the same on every process."""
        own, elsewhere = part.locate(input_ids)
        found = type(embedding).forward(embedding, own)
        return group.summed.leave(found.masked_fill(elsewhere[..., None], 0.0))

    embedding.__dict__["forward"] = look_up


def _score_part(head: nn.Linear, part: VocabularyPart, group: TensorParallelGroup) -> None:
    head.out_features = part.count
    fp8_scales.share_scales(head, group, inputs=False, outputs=True)
    enter_at(head, group.summed)

    def add_other_parts(head: nn.Module, given: Any, logits: Tensor) -> Tensor | None:
        """Returns the logits (..., V) of all parts, unless an objective works on its own part."""
        if part.is_alone:
            return None
        return group.summed.leave(F.pad(logits, (part.first, part.size - part.first - part.count)))

    head.register_forward_hook(add_other_parts)
