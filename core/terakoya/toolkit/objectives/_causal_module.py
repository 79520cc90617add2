"""The root module of objectives that predict the next token. It can run the vocabulary head on a part of the positions
at a time; without a `z_loss` the gradients of each part are formed in the forward, and nothing is computed twice.

Letters: B rows, T positions, H hidden size, n positions of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.toolkit.objectives._head_in_parts import sum_with_gradients
from terakoya.toolkit.objectives.columns import most_likely
from terakoya.toolkit.objectives.cross_entropy import summed_cross_entropy_, summed_cross_entropy_and_z_
from terakoya.toolkit.objectives.padded_head import padded_head
from terakoya.toolkit.torch_operations import is_traced


class CausalModule(nn.Module):
    """Wraps `model`; its forward returns loss sums in float32, not means."""

    def __init__(
        self, architecture: Architecture, model: PreTrainedModel, *, z_loss: bool, head_positions: int | None
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.model = model
        self.z_loss = z_loss
        self.head_positions = head_positions

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns sums over the micro-batch: `lm_loss`; `z_loss` if it has a weight; in evaluation also
        `token_accuracy`, the number of correct predictions."""
        hidden = self.architecture.hidden(self.model, batch).flatten(0, 1)
        labels = batch["labels"].flatten()
        if self.head_positions is None:
            return self._score(hidden, labels)
        parts = list(zip(hidden.split(self.head_positions), labels.split(self.head_positions), strict=True))
        if self.training and torch.is_grad_enabled() and not self.z_loss and not is_traced():
            with padded_head(self.model):
                total = sum_with_gradients(lambda *part: self._score(*part)["lm_loss"], parts)
            if total is not None:
                return {"lm_loss": total}
        scores = [self._checkpointed_score(*part) for part in parts]
        return {name: torch.stack([each[name] for each in scores]).sum() for name in scores[0]}

    def _checkpointed_score(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Computes `_score` without keeping activations: the backward computes it again."""
        if not torch.is_grad_enabled():
            return self._score(hidden, labels)
        return checkpoint(self._score, hidden, labels, use_reentrant=False, preserve_rng_state=False)

    def _score(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the sums over positions `hidden` (n, H) with `labels` (n,), -100 ignored."""
        with padded_head(self.model) as columns:
            logits = self.architecture.logits(self.model, hidden)
        sums = {}
        if not self.training:
            sums["token_accuracy"] = (most_likely(logits, columns) == labels).sum(dtype=torch.float32)
        if not self.z_loss:
            return sums | {"lm_loss": summed_cross_entropy_(logits, labels, columns)}
        loss, z = summed_cross_entropy_and_z_(logits, labels, columns)
        return sums | {"lm_loss": loss, "z_loss": z}
