"""Operations per token, compared with figures that are computed by hand from the models' shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from terakoya.components import Architecture
from terakoya.components.flops import mean_context, per_token

Blocks = Callable[[Any], Sequence[torch.nn.Module]]


def count(kind: type[PreTrainedModel], config: PretrainedConfig, blocks: Blocks, **how: Any) -> float:
    with torch.device("meta"):
        model = kind(config)
    return per_token(model, blocks(model), **how)


def test_bert_base() -> None:
    """12 layers of 4 h^2 + 2 h i, attention over 512 positions, the head (h^2 + h V) at 15 % of them."""
    layers = 12 * (4 * 768**2 + 2 * 768 * 3072)
    by_hand = 6 * layers + 12 * 12 * 768 * 512 + 6 * 0.15 * (768**2 + 768 * 32768)
    config = BertConfig(vocab_size=32768)
    got = count(BertForMaskedLM, config, lambda model: model.bert.encoder.layer, context=512, head_share=0.15)
    assert got == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx(0.589e9, rel=2e-3), "as published for this size"
    paired = count(BertForPreTraining, config, lambda model: model.bert.encoder.layer, context=512, head_share=0.15)
    assert paired - by_hand == pytest.approx(6 * 0.15 * 2 * 768), "of the next-sentence head no more than its two rows"


def test_gpt2_124m() -> None:
    """Both ways of counting attention: over all positions, as in nanoGPT and PaLM, and over visible positions."""
    weights = 12 * (4 * 768**2 + 2 * 768 * 3072) + 768 * 50257
    attention = 12 * 12 * 768 * 1024
    config = GPT2Config()
    blocks = lambda model: model.transformer.h  # noqa: E731
    assert count(GPT2LMHeadModel, config, blocks, context=1024, causal=False) == 6 * weights + attention
    assert count(GPT2LMHeadModel, config, blocks, context=1024) == 6 * weights + attention / 2
    assert 6 * weights + attention == pytest.approx(0.855e9, rel=1e-3)


def test_llama_8b() -> None:
    """Grouped queries: keys and values are 1024 wide; three products in the feed-forward."""
    layers = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    by_hand = 6 * layers + 6 * 32 * 4096 * 4096 + 6 * 4096 * 128256
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    assert count(LlamaForCausalLM, config, lambda model: model.model.layers, context=4096) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(48.2e9, rel=2e-3)


def test_heads_wider_than_the_hidden_states() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32, vocab_size=100, tie_word_embeddings=True)
    layers = 2 * (64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96)
    by_hand = 6 * layers + 6 * 2 * 128 * 50 + 6 * 64 * 100
    assert count(Qwen3ForCausalLM, config, lambda model: model.model.layers, context=50) == by_hand


def frozen_gpt2(layers: int) -> Any:
    """GPT-2 of width 64 and feed-forward 256, its embeddings and the lowest 2 of `layers` layers frozen."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=layers, n_head=4, n_positions=32, vocab_size=1000))
    for part in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:2]):
        part.requires_grad_(False)
    return model


def test_no_gradient_enters_frozen_layers_below_the_lowest_trained_layer() -> None:
    """Of 3 layers, 2 and the words frozen: the product alone, 2 and 4; the head has the words' matrix, but a gradient
    passes it: 4."""
    model = frozen_gpt2(3)
    layer = 4 * 64**2 + 2 * 64 * 256
    by_hand = 2 * 2 * layer + 2 * 4 * 64 * 15 + 6 * layer + 12 * 64 * 15 + 4 * 64 * 1000
    assert per_token(model, model.transformer.h, context=30) == by_hand


def test_frozen_blocks_between_trained_blocks_pass_the_gradient() -> None:
    model = frozen_gpt2(3)
    model.transformer.wpe.requires_grad_(True)
    layer = 4 * 64**2 + 2 * 64 * 256
    by_hand = 4 * 2 * layer + 6 * layer + 3 * 12 * 64 * 15 + 4 * 64 * 1000
    assert per_token(model, model.transformer.h, context=30) == by_hand


def test_weights_with_adapters_have_no_gradient_themselves() -> None:
    """Rank 4 on queries and values of both layers of a BERT, and a dense layer of the head trained as a copy."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=500))
    peft = pytest.importorskip("peft")
    whole = ["transform.dense"]
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=whole), model, "default"
    )
    layers = 2 * (4 * 64**2 + 2 * 64 * 96)
    adapters = 2 * 2 * (64 * 4 + 4 * 64)
    by_hand = 4 * layers + 6 * adapters + 12 * 2 * 64 * 20 + 0.5 * (6 * 64**2 + 4 * 64 * 500)
    assert per_token(model, model.bert.encoder.layer, context=20, head_share=0.5) == by_hand


def test_with_adapters_in_the_upper_layer_only_no_gradient_enters_the_lower_layer() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=500))
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["layers.1.mlp.up_proj"]), model, "default")
    layer = 4 * 64**2 + 3 * 64 * 96
    by_hand = (2 + 4) * layer + 6 * (64 * 4 + 4 * 96) + (4 + 12) * 64 * 10 + 4 * 64 * 500
    assert per_token(model, model.model.layers, context=20) == by_hand


def test_a_window_bounds_the_context() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = ModernBertConfig(**sizes, vocab_size=50368, local_attention=16)
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    blocks = lambda model: model.model.layers  # noqa: E731
    short = count(ModernBertForMaskedLM, config, blocks, context=10)
    long = count(ModernBertForMaskedLM, config, blocks, context=100)
    assert long - short == 12 * 64 * ((100 - 10) + 2 * (16 - 10))


def test_repeated_layers_count_repeatedly() -> None:
    config = AlbertConfig(
        vocab_size=1000, embedding_size=32, hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=128,
    )  # fmt: skip
    layer = 4 * 64**2 + 2 * 64 * 128
    by_hand = 6 * (6 * layer + 32 * 64) + 12 * 6 * 64 * 20 + 6 * (64 * 32 + 32 * 1000)
    blocks = lambda model: model.albert.encoder.albert_layer_groups  # noqa: E731
    assert count(AlbertForMaskedLM, config, blocks, context=20) == by_hand


def test_a_token_passes_one_half_of_an_encoder_decoder() -> None:
    config = T5Config(vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    encoder, decoder = 2 * (4 * 64**2 + 2 * 64 * 128), 2 * (8 * 64**2 + 2 * 64 * 128)
    by_hand = 3 * (encoder + decoder) + 12 * 2 * 64 * 20 + 6 * 0.2 * 64 * 500
    blocks = lambda model: [*model.encoder.block, *model.decoder.block]  # noqa: E731
    got = count(T5ForConditionalGeneration, config, blocks, context=20, head_share=0.2)
    assert got == pytest.approx(by_hand)


def test_mean_context_weights_documents_by_their_length() -> None:
    rows = np.array([[0, 0, 0, 0, 1, 1, -1, -1], [0, 0, 0, -1, -1, -1, -1, -1]])
    assert mean_context(rows) == (16 + 4 + 9) / (4 + 2 + 3)


def test_an_unknown_kind_of_model_is_counted_by_its_weights() -> None:
    """An architecture without blocks, heads or layers still has a count, and its run starts."""

    class OwnConfig(PretrainedConfig):
        model_type = "own"

    class Own(PreTrainedModel):
        config_class = OwnConfig

        def __init__(self, config: OwnConfig) -> None:
            super().__init__(config)
            self.words = torch.nn.Embedding(50, 8)
            self.mix = torch.nn.Linear(8, 16)
            self.head = torch.nn.Linear(16, 50)

    model = Own(OwnConfig())
    assert Architecture().flops_per_token(model, context=20) == 6 * (8 * 16 + 16 * 50)
