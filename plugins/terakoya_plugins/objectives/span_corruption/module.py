"""The root module of span corruption: an encoder-decoder with a vocabulary head at the decoder's positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.toolkit.objectives.columns import most_likely
from terakoya.toolkit.objectives.cross_entropy import IGNORED, summed_cross_entropy_
from terakoya.toolkit.objectives.padded_head import padded_head


class SpanCorruptionModule(nn.Module):
    """Wraps `model`; its forward returns loss sums in float32, not means. `special` are the ids that stand for no
    text."""

    def __init__(self, architecture: Architecture, model: PreTrainedModel, special: Sequence[int]) -> None:
        super().__init__()
        self.architecture = architecture
        self.model = model
        self.special = tuple(special)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the micro-batch: `span_loss`; in evaluation also the number of correct target tokens, and the loss
        of those that are text."""
        hidden = self.architecture.hidden(self.model, batch)
        with padded_head(self.model) as columns:
            logits = self.architecture.logits(self.model, hidden.flatten(0, 1))
        labels = batch["labels"].flatten()
        sums = {}
        if not self.training:
            sums["target_accuracy"] = (most_likely(logits, columns) == labels).sum(dtype=torch.float32)
            special = torch.isin(labels, torch.tensor(self.special, device=labels.device))
            sums["replaced_loss"] = summed_cross_entropy_(logits, labels.masked_fill(special, IGNORED), columns)
        return sums | {"span_loss": summed_cross_entropy_(logits, labels, columns)}
