"""T5 (Raffel et al., 2020, arXiv:1910.10683): an encoder and a decoder with relative position biases.

T5 attends with three masks, in the encoder, in the decoder and between the two, and hands them to its layers itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Head
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, T5Config


class T5(Architecture):
    """Fields bear the names of Transformers' `T5Config`; defaults are T5-base's."""

    heads: ClassVar[frozenset[Head]] = frozenset({"seq2seq"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "mask4d"

    d_model: PositiveInt = 768
    d_kv: PositiveInt = 64
    d_ff: PositiveInt = 3072
    num_layers: PositiveInt = 12
    num_decoder_layers: PositiveInt | None = None
    """As many as `num_layers` where not given."""
    num_heads: PositiveInt = 12
    relative_attention_num_buckets: PositiveInt = 32
    relative_attention_max_distance: PositiveInt = 128
    dropout_rate: NonNegativeFloat = 0.1
    layer_norm_epsilon: PositiveFloat = 1e-6
    initializer_factor: PositiveFloat = 1.0
    feed_forward_proj: Literal["relu", "gated-gelu"] = "relu"
    """`gated-gelu` is T5 1.1's. Its own vocabulary head is not: Transformers' T5 ties the head to the embeddings."""

    def config(self, vocabulary: Vocabulary) -> T5Config:
        """The `T5Config`; decoders start with the padding id and end with [SEP]."""
        from transformers import T5Config

        return T5Config(
            **self.model_dump(),
            vocab_size=vocabulary.size,
            pad_token_id=vocabulary.pad,
            decoder_start_token_id=vocabulary.pad,
            eos_token_id=vocabulary.sep,
        )

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`T5ForConditionalGeneration`."""
        from transformers import T5ForConditionalGeneration

        return T5ForConditionalGeneration(self.config(vocabulary))

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The decoder's last hidden states (B, S, H); documents in one row never see each other.

        Beside `input_ids` and `document_ids` (B, T), `batch` holds `decoder_input_ids` and `decoder_document_ids`
        (B, S).
        """
        from terakoya.toolkit.architectures.attention import additive, document_mask

        source, target = batch["document_ids"], batch["decoder_document_ids"]
        encoded = model.encoder(
            input_ids=batch["input_ids"], attention_mask=additive(document_mask(source))
        ).last_hidden_state
        return model.decoder(
            input_ids=batch["decoder_input_ids"],
            attention_mask=additive(document_mask(target).tril()),
            encoder_hidden_states=encoded,
            encoder_attention_mask=additive(document_mask(target, source)),
            use_cache=False,
        ).last_hidden_state

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H), which a tied head takes scaled."""
        return model.lm_head(hidden * model.config.d_model**-0.5)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The encoder's layers, then the decoder's."""
        return [*model.encoder.block, *model.decoder.block]


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `t5`."""
    return {"t5": T5}
