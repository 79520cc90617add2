"""The root module of contrastive learning: an encoder and the mean of its hidden states.

Letters in shapes: B rows, T positions, H hidden size, D documents of a row, S documents and halves of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.errors import UserError
from terakoya.toolkit.objectives.compared_examples import Compare, forward_examples


class ContrastiveModule(nn.Module):
    """Wraps `model`; the forward returns sums over examples in float32."""

    def __init__(
        self,
        architecture: Architecture,
        model: PreTrainedModel,
        *,
        halves: bool,
        pooling: Literal["mean", "cls"],
        compare: Compare,
    ) -> None:
        super().__init__()
        if not halves and not _has_dropout(model):
            raise UserError(
                f'objective contrastive: the views "dropout" differ by dropout, and architecture '
                f'{type(architecture).__name__} has none; set its hidden dropout, or objective.views to "halves"'
            )
        self.architecture = architecture
        self.model = model
        self.halves, self.pooling, self.compare = halves, pooling, compare
        encoder = {id(each) for each in model.base_model.parameters()}
        for each in model.parameters():
            if id(each) not in encoder:
                each.requires_grad_(False)  # of the vocabulary head, which no loss reaches

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        examples = batch["examples"]
        rows, count = examples.shape
        if self.halves:
            embeddings = self._pool(batch, 2 * count).view(rows, count, 2, -1)
        else:
            embeddings = torch.stack([self._pool(batch, count), self._pool(batch, count)], 2)
        return forward_examples(batch, embeddings.flatten(0, 1), examples.flatten(), self.compare)

    def _pool(self, batch: Mapping[str, Tensor], count: int) -> Tensor:
        """The embeddings (B, S, H) float32 of the first `count` documents of each row; zeros where there is none."""
        hidden = self.architecture.hidden(self.model, batch)
        numbers = torch.arange(count, device=hidden.device)
        members = batch["document_ids"][:, None] == numbers[:, None]  # (B, S, T)
        if self.pooling == "cls":
            members = members & (batch["position_ids"] == 0)[:, None]
        sums = members.to(hidden.dtype) @ hidden
        return sums.float() / members.sum(-1, keepdim=True).clamp(min=1)


def _has_dropout(model: PreTrainedModel) -> bool:
    layers = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    settings = model.config.to_dict()
    return layers or any("drop" in name and isinstance(value, float) and value > 0 for name, value in settings.items())
