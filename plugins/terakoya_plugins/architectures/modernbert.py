"""ModernBERT (Warner et al., 2024, arXiv:2412.13663): rotary positions, gated feed-forward, mostly local attention.

Every `global_attn_every_n_layers`-th layer sees its whole document, the others `local_attention` positions.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.encoder import TEXT_END_IDS, EncoderArchitecture
from terakoya.toolkit.architectures.modernbert_settings import ModernBertSettings


class ModernBert(ModernBertSettings, EncoderArchitecture):
    """Fields have the names of Transformers' `ModernBertConfig`; defaults are ModernBERT-base's."""

    config_class = "ModernBertConfig"
    bf16_stream = True
    config_ids: ClassVar = {**TEXT_END_IDS, "cls_token_id": "cls", "sep_token_id": "sep"}
    model_classes: ClassVar = {
        "masked": "ModernBertForMaskedLM", "discriminator": "ModernBertForTokenClassification",
        "body": "ModernBertModel",
    }  # fmt: skip
    vocabulary_head, discriminator_head = ("head", "decoder"), ("head", "drop", "classifier")
    block_list, calls_whole_body = "layers", True
    output_layers = ("Wo",)
    mup_widths = ("hidden_size", "num_attention_heads", "intermediate_size")
    fused_layers: ClassVar = {"Wqkv": 3, "Wi": 2}
    test_settings: ClassVar = {"local_attention": 8}

    local_rope_theta: shared.RopeTheta = 10_000.0
    classifier_pooling: Literal["mean", "cls"] = "mean"
    """What a classification head on the finished model reads, in Transformers: the mean of the last hidden states, or
    that of [CLS], which local layers let see its neighbours alone. Pre-training does not depend on it."""


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"modernbert": ModernBert}
