"""Encoder-decoders of Transformers in T5's shape, which pass the given masks to their layers.

Letters in shapes: B rows, T positions of the encoder, S positions of the decoder, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from terakoya.components import DocumentMasking
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class EncoderDecoderArchitecture(TransformersArchitecture):
    """The base of encoder-decoder families. A family adds its fields, `config_class`, `model_classes` and `logits`."""

    document_masking: ClassVar[DocumentMasking] = "mask_4d"
    config_ids: ClassVar = {"pad_token_id": "pad", "decoder_start_token_id": "pad", "eos_token_id": "encoder_end"}
    undeclared_arguments: ClassVar = frozenset({"decoder_start_token_id"})

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the decoder's last hidden states (B, S, H); documents in one row do not see each other.

        In addition to `input_ids` and `document_ids` (B, T), `batch` holds `decoder_input_ids` and
        `decoder_document_ids` (B, S).
        """
        from terakoya.toolkit.architectures.attention import additive, causal_mask, document_mask

        source, target = batch["document_ids"], batch["decoder_document_ids"]
        encoded = model.encoder(
            input_ids=batch["input_ids"], attention_mask=additive(document_mask(source))
        ).last_hidden_state
        return model.decoder(
            input_ids=batch["decoder_input_ids"],
            attention_mask=additive(causal_mask(target)),
            encoder_hidden_states=encoded,
            encoder_attention_mask=additive(document_mask(target, source)),
            use_cache=False,
        ).last_hidden_state

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """Returns the encoder's layers, then the decoder's."""
        return [*model.encoder.block, *model.decoder.block]
