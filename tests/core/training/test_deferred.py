"""Deferred weights have the bits that they would have at once, and code that needs them at once gets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import Tensor, nn

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import connect
from terakoya.distributed.topology import LaunchInfo
from terakoya.plugins import registry
from terakoya.rows.stores import Stores
from terakoya.toolkit.deferred_tensors import CannotDeferError, DeferredTensors
from terakoya.training.model.build import build_initial, build_module
from terakoya.training.model.module_parts import named_values
from terakoya_contract.toy import VOCABULARY, settings

FAMILIES = (
    "bert", "deberta", "deberta_v2", "electra", "eurobert", "gemma3_text", "gpt2", "gptj", "llama", "mistral",
    "modernbert", "modernbert_decoder", "olmo2", "qwen3", "roberta", "t5",
)  # fmt: skip


def seeded(make: Callable[[], Any]) -> tuple[Any, Tensor]:
    """What `make` returns after seeding, and the generator's state afterwards."""
    torch.manual_seed(5)
    return make(), torch.get_rng_state()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_every_family_are_drawn_as_at_once(family: str) -> None:
    architecture: Any = settings(registry().component("architectures", family))
    for head in sorted(architecture.heads)[:1]:
        whole, state = seeded(lambda head=head: architecture.build(VOCABULARY, head))  # type: ignore[misc]
        with DeferredTensors() as deferred:
            model, ended = seeded(lambda head=head: architecture.build(VOCABULARY, head))  # type: ignore[misc]
        assert torch.equal(state, ended)
        matrices = [value for value in model.parameters() if value.ndim > 1]
        assert all(value.is_meta for value in matrices)
        values = dict(named_values(model))
        for name, value in reversed(list(named_values(whole))):  # in any order
            assert torch.equal(deferred.value(values[name]), value), name


def initialised() -> list[Tensor]:
    """Tensors that are made and changed in many ways."""
    linear, other, convolution = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(4, 4, 3)
    nn.init.orthogonal_(linear.weight)
    nn.init.sparse_(other.weight, 0.3)
    nn.init.dirac_(convolution.weight)
    wide = nn.init.trunc_normal_(torch.empty(30, 30), std=0.5, a=-0.4, b=0.9)
    product = torch.randn(4, 4) * linear.weight.detach()[:4, :4]
    joined = torch.cat([linear.weight.detach()[:2], other.weight.detach()[2:].double().float()])
    like = torch.rand_like(wide) + torch.zeros_like(wide)
    with torch.no_grad():
        linear.weight.mul_(0.5)
        other.weight[3] = linear.weight[2]
        other.weight[5, 1] = 3.0
        other.bias.add_(linear.bias)
        ones = nn.Parameter(torch.ones(8))
        ones.copy_(linear.weight[1])
    if not torch.equal(linear.weight[2], other.weight[3]) or float(other.weight[5, 1].detach()) != 3.0:
        raise ValueError("values that are asked for are there")
    modules = (linear, other, convolution, nn.LSTM(4, 4), nn.MultiheadAttention(8, 2), nn.EmbeddingBag(8, 4))
    return [wide, product, joined, like, ones, *(value for module in modules for value in module.parameters())]


def test_whatever_is_done_to_weights_is_done_later() -> None:
    whole, state = seeded(initialised)
    with DeferredTensors() as deferred:
        later, ended = seeded(initialised)
    assert torch.equal(state, ended)
    assert sum(deferred.is_deferred(value) for value in later) == 19
    for one, other in zip(whole, later, strict=True):
        assert torch.equal(one, deferred.value(other))


def test_asking_for_a_value_draws_nothing_from_the_generator() -> None:
    with DeferredTensors() as deferred:
        weight = torch.empty(5).normal_()
    before = torch.get_rng_state()
    assert torch.equal(deferred.value(weight), deferred.value(weight))
    assert torch.equal(before, torch.get_rng_state())


def test_the_output_of_a_model_is_refused() -> None:
    with DeferredTensors():
        layer = nn.Linear(4, 4)
        with pytest.raises(CannotDeferError, match="more than 1000 operations"):
            value = layer.weight
            for _ in range(12):
                value = value @ value


def needing(model: Any) -> None:
    model.lm_head.weight.detach().numpy()


def unset(model: Any) -> None:
    model.extra = nn.Parameter(torch.empty(3))


@pytest.mark.parametrize(("needs", "obstacle"), [(needing, "meta device"), (unset, "nothing sets model.extra")])
def test_code_that_needs_weights_at_once_gets_them(
    needs: Callable[[Any], None], obstacle: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = settings(registry().component("architectures", "llama")).model_dump()
    causal = {"architecture": {"type": "llama", **sizes}, "objective": {"type": "causal_lm", "append_eos": False}}
    parameters = Parameters.from_dict(toy.parameters(store, **causal), source="test")
    build = type(parameters.architecture).build

    def build_and_look(self: Any, *arguments: Any) -> Any:
        model = build(self, *arguments)
        needs(model)
        return model

    monkeypatch.setattr(type(parameters.architecture), "build", build_and_look)
    opened, context = Stores.open(parameters.data), connect(LaunchInfo.from_environment())
    built = build_initial(
        parameters, opened.vocabulary, opened.train[0].tokenizer_folder, context, fresh=True, in_parts=True
    )
    assert built.obstacle is not None and obstacle in built.obstacle
    assert built.deferred is None
    expected = dict(build_module(parameters, opened.vocabulary).named_parameters())
    for name, value in built.module.named_parameters():
        assert not value.is_meta and (name == "model.extra" or torch.equal(value, expected[name]))
