"""EuroBERT (Boizard et al., 2025, arXiv:2503.05500): Llama's blocks as an encoder, in which a position sees its whole
document.

It is also how a Llama becomes an encoder: the weights have the same names, so a run may start from a Llama's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from terakoya import hookimpl
from terakoya.components import Architecture, Vocabulary
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import GatedDecoderArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class EuroBert(GatedDecoderArchitecture):
    """Fields have the names of Transformers' `EuroBertConfig`; defaults are EuroBERT 210M's."""

    config_class = "EuroBertConfig"
    bf16_stream = True
    model_classes: ClassVar = {"masked": "EuroBertForMaskedLM", "body": "EuroBertModel"}
    same_weights = frozenset({"llama"})
    mup_widths = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    test_settings: ClassVar = {"num_key_value_heads": 2}

    hidden_size: shared.HiddenSize = 768
    intermediate_size: shared.IntermediateSize = 3072
    num_hidden_layers: shared.NumHiddenLayers = 12
    num_attention_heads: shared.NumAttentionHeads = 12
    max_position_embeddings: shared.MaxPositionEmbeddings = 8192
    hidden_act: shared.Activation = "silu"
    rope_theta: shared.RopeTheta = 250_000.0
    rms_norm_eps: shared.NormEps = 1e-5

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields, the vocabulary's size and the special ids; CLS and SEP are at both ends of a text."""
        ids = {"bos_token_id": vocabulary.cls, "eos_token_id": vocabulary.encoder_end, "pad_token_id": vocabulary.pad}
        mask = vocabulary.mask or 0  # the config must have one; without it nothing is trained
        return super().config_arguments(vocabulary) | ids | {"mask_token_id": mask}

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the last hidden states (B, T, H), after the final norm: a position sees its whole document."""
        from terakoya.toolkit.architectures import attention

        given = {name: batch[name] for name in ("inputs_embeds",) if name in batch} or {"input_ids": batch["input_ids"]}
        return model.base_model(
            **given, position_ids=batch["position_ids"], **attention.arguments(model, batch)
        ).last_hidden_state


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"eurobert": EuroBert}
