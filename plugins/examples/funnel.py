"""Funnel Transformer (Dai et al., 2020, arXiv:2006.03236): blocks that halve the sequence, a decoder that restores it.

Pooling mixes neighbours, so documents cannot share a row: use the layouts `lines` and `stream`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Funnel(TransformersArchitecture):
    """Fields have the names and defaults of Transformers' `FunnelConfig`."""

    config_class = "FunnelConfig"
    config_ids: ClassVar = {}
    """No padding id: Transformers sets its embedding to zero whenever it loads a Funnel, and so a row of the vocabulary
    head, which shares the embeddings' weights."""
    model_classes: ClassVar = {"masked": "FunnelForMaskedLM", "discriminator": "FunnelForPreTraining"}
    document_masking = "none"
    test_settings: ClassVar = {"block_sizes": (1, 1), "d_head": 4}

    block_sizes: tuple[PositiveInt, ...] = (4, 4, 4)
    """Layers of each block. From the second block on, the sequence is half as long as in the previous block."""
    num_decoder_layers: PositiveInt = 2
    d_model: PositiveInt = 768
    n_head: PositiveInt = 12
    d_head: PositiveInt = 64
    """Width of an attention head."""
    d_inner: PositiveInt = 3072
    hidden_dropout: NonNegativeFloat = 0.1
    """The share of hidden values that dropout sets to zero."""
    attention_dropout: NonNegativeFloat = 0.1
    """The share of attention weights that dropout sets to zero."""
    activation_dropout: NonNegativeFloat = 0.0
    """The share of values inside a feed-forward layer that dropout sets to zero."""

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the last hidden states (B, T, H). Positions are relative, so those of the batch are not needed."""
        mask = (batch["document_ids"] >= 0).long()
        return model.funnel(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.lm_head(hidden)

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, T) that a token was replaced, of `hidden` (B, T, H)."""
        return model.discriminator_predictions(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """Returns the layers of all blocks and of the decoder."""
        return [*(layer for block in model.funnel.encoder.blocks for layer in block), *model.funnel.decoder.layers]


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `funnel`."""
    return {"funnel": Funnel}
