"""What an architecture promises of `cut`: stages, one after another, compute what the whole model does.

Letters in shapes: B rows, T positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.contract.batches import difference
from terakoya.contract.findings import NotLookedAt, Wrong
from terakoya.training.distributed.topology import split

COUNT = 2
"""Stages that a model is cut into."""
TOLERANCE = 1e-5


def check(architecture: Architecture, models: Sequence[PreTrainedModel], batch: Mapping[str, Tensor]) -> None:
    """Tries `models`, 1 + COUNT equal ones of which all but the first are then cut, on `batch`.

    Raises:
        Wrong: what stages compute is not what the whole does, or one keeps what lies in others.
        NotLookedAt: the architecture cannot be cut, or its toy size has too few blocks.
    """
    if type(architecture).cut is Architecture.cut:
        raise NotLookedAt("cut is not written: parallel.pp_size is refused")
    whole, *stages = models
    blocks = len(architecture.blocks(whole))
    if blocks < COUNT:
        raise NotLookedAt(f"{blocks} block at toy size: nothing to cut")
    hidden: Tensor | None = None
    with torch.no_grad():
        for index, model in enumerate(stages):
            kept = range(*split(blocks, COUNT, index))
            architecture.cut(model, kept)
            _weights(model, whole, kept, len(architecture.blocks(model)))
            hidden = architecture.hidden(model, batch if hidden is None else {**batch, "inputs_embeds": hidden})
        assert hidden is not None
        found = difference(hidden, architecture.hidden(whole, batch))
    if found > TOLERANCE:
        raise Wrong(
            f"{COUNT} stages, one after another, give hidden states that differ by {found:.1g} from the whole model's. "
            "Behind the first, hidden must begin with batch['inputs_embeds'] and add nothing to it that the first has "
            "added; before the last, it must end without the final norm"
        )


def _weights(model: nn.Module, whole: nn.Module, kept: range, left: int) -> None:
    """Raises Wrong where `model`, cut down to the blocks `kept` of `whole`, has others `left`, or all its weights."""
    if left != len(kept):
        raise Wrong(f"cut was to keep {len(kept)} of the blocks, but blocks gives {left} of what is left")
    weights, all_weights = (sum(each.numel() for each in one.parameters()) for one in (model, whole))
    if weights >= all_weights:
        raise Wrong(f"a stage with {len(kept)} of the blocks has as many weights, {weights:,}, as the whole model")
