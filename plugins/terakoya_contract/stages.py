"""The check of `keep_stage_blocks`: pipeline stages, one after another, compute the same as the whole model.

Letters in shapes: B rows, T positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.distributed.topology import split_evenly
from terakoya_contract.batches import difference
from terakoya_contract.results import CheckFailed, CheckSkipped

COUNT = 2
"""Number of stages that a model is cut into."""
TOLERANCE = 1e-5


def check_stages(architecture: Architecture, models: Sequence[PreTrainedModel], batch: Mapping[str, Tensor]) -> None:
    """Runs `batch` through `models`: 1 + COUNT equal models, of which all but the first are cut into stages.

    Raises:
        CheckFailed: the stages compute something else than the whole model, a stage keeps weights of another, or does
            not say where its embeddings and head are.
        CheckSkipped: the architecture cannot be cut, or its toy size has too few blocks.
    """
    if type(architecture).keep_stage_blocks is Architecture.keep_stage_blocks:
        raise CheckSkipped("keep_stage_blocks is not implemented: parallel.pp_size is refused")
    whole, *stages = models
    blocks = len(architecture.blocks(whole))
    if blocks < COUNT:
        raise CheckSkipped(f"{blocks} block at toy size: nothing to cut")
    hidden: Tensor | None = None
    with torch.no_grad():
        for index, model in enumerate(stages):
            kept = range(*split_evenly(blocks, COUNT, index))
            architecture.keep_stage_blocks(model, kept)
            _check_weights(model, whole, kept, len(architecture.blocks(model)))
            _check_vocabulary(model, index)
            hidden = architecture.hidden(model, batch if hidden is None else {**batch, "inputs_embeds": hidden})
        assert hidden is not None
        error = difference(hidden, architecture.hidden(whole, batch))
    if error > TOLERANCE:
        raise CheckFailed(
            f"{COUNT} stages, one after another, give hidden states that differ by {error:.1g} from the whole model's. "
            "After the first stage, hidden must start from batch['inputs_embeds'] and add nothing that the first stage "
            "has added; before the last stage, it must end without the final norm"
        )


def _check_weights(model: nn.Module, whole: nn.Module, kept: range, remaining: int) -> None:
    """Raises CheckFailed where `model`, cut down to the blocks `kept` of `whole`, has another number of `remaining`
    blocks, or as many weights as `whole`."""
    if remaining != len(kept):
        raise CheckFailed(
            f"keep_stage_blocks had to keep {len(kept)} of the blocks, but blocks returns {remaining} afterwards"
        )
    weights, all_weights = (sum(each.numel() for each in one.parameters()) for one in (model, whole))
    if weights >= all_weights:
        raise CheckFailed(
            f"a stage with {len(kept)} of the blocks has as many weights, {weights:,}, as the whole model"
        )


def _check_vocabulary(model: PreTrainedModel, index: int) -> None:
    """Raises CheckFailed where `model`, stage `index`, has no embeddings or head to return, not even replaced ones."""
    try:
        model.get_input_embeddings()
        model.get_output_embeddings()
    except AttributeError as error:
        raise CheckFailed(
            f"stage {index + 1} of {COUNT} does not say where its embeddings and head are, which parallel.tp_size asks "
            f"of each stage: {error}. Put an Identity in the place of those of another stage"
        ) from error
