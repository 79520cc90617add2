"""Attention with rotary positions in the bf16 stream beside that of Transformers in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from exact_models import errors, rounded
from torch import Tensor, nn
from transformers import (
    EuroBertConfig,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderModel,
    ModernBertModel,
    Olmo2Config,
    Olmo2Model,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
)

from terakoya_precision.bf16_decoder_blocks import RotaryAttention
from terakoya_precision.bf16_encoder_blocks import IS_ONE, branch
from terakoya_precision.bf16_functions import Products, Rotation
from terakoya_precision.bf16_stream import WeightCopies

SIZES = {
    "vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "pad_token_id": 0,
}  # fmt: skip
SHARED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaModel(LlamaConfig(**SHARED)),
    "mistral": lambda: MistralModel(MistralConfig(**SHARED, sliding_window=5)),
    "qwen3": lambda: Qwen3Model(Qwen3Config(**SHARED)),
    "olmo2": lambda: Olmo2Model(Olmo2Config(**{**SIZES, "num_key_value_heads": 2})),
    "gemma3": lambda: Gemma3TextModel(Gemma3TextConfig(**SHARED, **LOCAL, sliding_window=5)),
    "eurobert": lambda: EuroBertModel(EuroBertConfig(**SHARED)),
    "modernbert": lambda: ModernBertModel(ModernBertConfig(**SIZES, **LOCAL, local_attention=8)),
    "modernbert_decoder": lambda: ModernBertDecoderModel(ModernBertDecoderConfig(**SIZES, **LOCAL, sliding_window=5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_those_of_transformers(name: str) -> None:
    torch.manual_seed(1)
    model = rounded(MODELS[name]()).train()
    model.config._attn_implementation = "sdpa"
    model.config.use_cache = False  # as in training: with a cache the forward is Transformers'
    exact = copy.deepcopy(model).double()
    names = list(model.state_dict())
    WeightCopies(model)
    assert list(model.state_dict()) == names
    attentions = [each for each in model.modules() if isinstance(each, RotaryAttention)]
    assert [getattr(each, IS_ONE, False) for each in attentions] == 2 * [name != "modernbert"]
    found = errors(model, exact)
    assert found.pop("result") <= 0.02
    assert max(found.values()) <= 0.03, found


def test_a_cache_is_filled_as_by_transformers() -> None:
    torch.manual_seed(1)
    model = rounded(MODELS["llama"]()).eval()
    model.config._attn_implementation = "sdpa"
    ids, exact = torch.arange(24)[None] % 8, copy.deepcopy(model).double()
    expected = exact(ids).last_hidden_state
    WeightCopies(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first = model(ids[:, :16], use_cache=True)
        rest = model(ids[:, 16:], past_key_values=first.past_key_values, use_cache=True)
    result = torch.cat([first.last_hidden_state, rest.last_hidden_state], 1)
    assert (result.double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rotation_is_that_of_float64(dtype: torch.dtype) -> None:
    """Also where the first half has other angles than the second, and with angles of float32."""
    torch.manual_seed(1)
    query, key = (torch.randn(2, 5, heads, 8).bfloat16().requires_grad_() for heads in (4, 2))
    angles = 100 * torch.rand(2, 5, 1, 8)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    given = [torch.randn_like(each) for each in (query, key)]
    results = Rotation.apply(query, key, cos, sin)
    got = torch.autograd.grad(results, (query, key), given)

    def turned(states: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        return states * cos.double() + torch.cat([-second, first], -1) * sin.double()

    doubles = [each.detach().double().requires_grad_() for each in (query, key)]
    exact = [turned(each) for each in doubles]
    expected = torch.autograd.grad(exact, doubles, [each.double() for each in given])
    unit = 2**-8
    for one, other in zip((*results, *got), (*exact, *expected), strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() <= (0.5 if dtype == torch.float32 else 1.0) * unit * other.norm()


@pytest.mark.parametrize("frozen", ["", "0.weight"])
def test_layers_as_one_product_have_the_gradients_of_float64(frozen: str) -> None:
    """Of several widths, with biases, and where a weight does not learn; its copies lie apart as where they are
    gathered."""
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(8, outputs) for outputs in (8, 4, 4)).bfloat16().float()
    states = torch.randn(2, 5, 8).bfloat16().requires_grad_()
    exact, given = copy.deepcopy(layers).double(), states.detach().double().requires_grad_()
    for name, weight in layers.named_parameters():
        weight.requires_grad_(name != frozen)
    copies = [{name: each.detach().bfloat16() for name, each in layer.named_parameters()} for layer in layers]
    results = branch(Products, list(layers), states, copies)  # type: ignore[arg-type]
    gradients = [torch.randn_like(each) for each in results]
    torch.autograd.backward(results, gradients)
    expected = [layer(given) for layer in exact]
    torch.autograd.backward(expected, [each.double() for each in gradients])
    pairs = [*zip(results, expected, strict=True), (states.grad, given.grad)]
    others = dict(exact.named_parameters())
    pairs += [(each.grad, others[name].grad) for name, each in layers.named_parameters() if name != frozen]
    assert sum(each.grad is None for each in layers.parameters()) == bool(frozen)
    for one, other in pairs:
        assert (one.double() - other).norm() <= 0.01 * other.norm()
