"""The root module of masked language modelling: a model whose vocabulary head runs at the masked positions only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.toolkit.objectives.columns import Columns, most_likely
from terakoya.toolkit.objectives.cross_entropy import summed_cross_entropy_
from terakoya.toolkit.objectives.padded_head import padded_head


class MaskedLMModule(nn.Module):
    """Wraps `model`; its forward returns loss sums in float32, not means."""

    def __init__(self, architecture: Architecture, model: PreTrainedModel, *, next_sentence: bool) -> None:
        super().__init__()
        self.architecture = architecture
        self.model = model
        self.next_sentence = next_sentence

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the micro-batch: `mlm_loss` and, with pairs, `nsp_loss`; in evaluation also correct predictions."""
        hidden = self.architecture.hidden(self.model, batch)
        picked = hidden.flatten(0, 1).index_select(0, batch["masked_positions"])
        with padded_head(self.model) as columns:
            logits = self.architecture.logits(self.model, picked)
        sums = self._score("mlm_loss", "masked_accuracy", logits, batch["masked_labels"], columns)
        if self.next_sentence:
            logits = self.architecture.next_sentence_logits(self.model, hidden)
            sums |= self._score("nsp_loss", "nsp_accuracy", logits, batch["next_sentence_labels"])
        return sums

    def _score(
        self, loss: str, accuracy: str, logits: Tensor, labels: Tensor, columns: Columns | None = None
    ) -> dict[str, Tensor]:
        """The summed cross entropy of `logits` (N, C) and `labels` (N,), -100 ignored; in evaluation also the number of
        correct predictions. `columns` say what the columns are; without them they are all classes."""
        sums = {}
        if not self.training:
            sums[accuracy] = (most_likely(logits, columns) == labels).sum(dtype=torch.float32)
        return sums | {loss: summed_cross_entropy_(logits, labels, columns)}
