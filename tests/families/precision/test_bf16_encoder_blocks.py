"""Encoder blocks of the bf16 stream beside those of Transformers in float64, with the same dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from exact_models import Given, errors, replace_dropouts, rounded
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    ElectraConfig,
    ElectraModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
)

from terakoya_precision.bf16_encoder_blocks import Attention, Layer, Output
from terakoya_precision.bf16_functions import OURS, Branch, SumNorm, sum_with_products
from terakoya_precision.bf16_stream import WeightCopies

SIZES = {
    "vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**SIZES)),
    "roberta": lambda: RobertaModel(RobertaConfig(**SIZES)),
    "electra": lambda: ElectraModel(ElectraConfig(**SIZES, embedding_size=32)),
    "deberta_v2": lambda: DebertaV2Model(DebertaV2Config(**SIZES)),
}


def close(got: Tensor, expected: Tensor, name: str) -> None:
    """Within 2 % of the whole."""
    assert (got.double() - expected).norm() <= 0.02 * expected.norm(), name


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What sums have kept, in their order."""
    seen: list[Tensor] = []
    draw = Tensor.bernoulli_

    def watched(tensor: Tensor, share: float) -> Tensor:
        seen.append(draw(tensor, share))
        return seen[-1]

    monkeypatch.setattr(Tensor, "bernoulli_", watched)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_those_of_transformers(name: str, kept: list[Tensor]) -> None:
    torch.manual_seed(1)
    model = rounded(MODELS[name]()).train()
    model.embeddings.dropout = nn.Identity()
    exact = copy.deepcopy(model).double()
    names = list(model.state_dict())
    WeightCopies(model)
    assert list(model.state_dict()) == names
    blocks = [each for each in model.modules() if isinstance(each, Attention | Layer)]
    assert len(blocks) == (0 if "deberta" in name else 4)
    assert sum(isinstance(each, Output) for each in model.modules()) == 4
    replace_dropouts(exact, lambda: Given(lambda: kept.pop(0)))
    found = errors(model, exact)
    assert max(found.values()) <= 0.02 and not kept, found
    # without gradients it is Transformers' own attention, of the same weights
    replace_dropouts(exact, nn.Identity)
    ids = torch.arange(48).view(2, 24) % 8
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        close(model.eval()(ids).last_hidden_state, exact(ids).last_hidden_state, "eval")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [(6,), (6, 4, 10)])
def test_a_branch_adds_what_came_back_to_its_products(outputs: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    layers = [rounded(nn.Linear(8, each, bias=bias)) for each in outputs]
    states = torch.randn(2, 5, 8).bfloat16().requires_grad_()
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    joined = [
        torch.cat([each.detach().bfloat16() for each in part]) for part in (weights, biases) if part[0] is not None
    ]
    totals = [None] * len(outputs)
    results = Branch.apply(states, joined[1] if bias else None, len(outputs), *weights, *biases, *totals, joined[0])
    given = [torch.randn_like(each) for each in results]
    before = [each.clone() for each in given]
    wanted = [states, *weights, *(biases if bias else [])]
    got = torch.autograd.grad(results, wanted, given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "gradients of others stay as they are"
    doubles = [each.detach().double().requires_grad_() for each in wanted]
    own = doubles[1 : 1 + len(outputs)]
    exact = [
        doubles[0] @ weight.t() + (doubles[1 + len(outputs) + number] if bias else 0.0)
        for number, weight in enumerate(own)
    ]
    expected = torch.autograd.grad([*exact, doubles[0] * 1], doubles, [each.double() for each in given])
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        close(a, b, str(number))
    for a, b in zip(results, [*exact, doubles[0]], strict=True):
        close(a.detach(), b.detach(), "result")


@pytest.mark.parametrize("dropout", [0.0, 0.25, 1.0])
def test_a_sum_gives_away_only_gradients_that_nobody_else_has(dropout: float, kept: list[Tensor]) -> None:
    torch.manual_seed(1)
    norm = rounded(nn.LayerNorm(16))
    states, residual = (torch.randn(40, 16).bfloat16().requires_grad_() for _ in range(2))
    seen: dict[str, Tensor] = {}
    copies = [each.detach().bfloat16() for each in (norm.weight, norm.bias)]
    result = SumNorm.apply(states * 1, residual * 1, norm.weight, norm.bias, *copies, 1e-5, dropout)
    for name, (node, _) in zip(("states", "residual"), result.grad_fn.next_functions, strict=False):
        node.register_prehook(lambda gradients, name=name: seen.update({name: gradients[0]}))
    weights = torch.randn(40, 16).bfloat16()
    result.backward(weights)
    assert getattr(seen["residual"], OURS, False) == (dropout > 0)
    assert not hasattr(seen["states"], OURS) or dropout == 0
    assert (seen["states"].data_ptr() == seen["residual"].data_ptr()) == (dropout == 0)
    # the same in float64
    share = kept[0] / (1 - dropout) if 0 < dropout < 1 else torch.tensor(1.0 - dropout)
    exact = copy.deepcopy(norm).double()
    exact.zero_grad()
    doubles = [each.detach().double().requires_grad_() for each in (states, residual)]
    expected = exact(doubles[0] * share + doubles[1])
    expected.backward(weights.double())
    close(result.detach(), expected.detach(), "result")
    for name, got, wanted in (
        ("states", states, doubles[0]), ("residual", residual, doubles[1]), ("weight", norm.weight, exact.weight),
        ("bias", norm.bias, exact.bias),
    ):  # fmt: skip
        assert got.grad is not None and wanted.grad is not None
        close(got.grad, wanted.grad, name)


def test_layers_of_adapters_keep_the_forward_of_transformers() -> None:
    class Adapted(nn.Linear):
        pass

    model = MODELS["bert"]()
    first, second = model.encoder.layer
    first.attention.self.key = Adapted(32, 32)
    second.intermediate.dense = Adapted(32, 64)
    WeightCopies(model)
    assert [isinstance(each.attention, Attention) for each in (first, second)] == [False, True]
    assert [isinstance(each, Layer) for each in (first, second)] == [True, False]


def test_hooks_of_every_module_are_called() -> None:
    model = MODELS["bert"]().train()
    WeightCopies(model)
    called: list[nn.Module] = []
    watched = [each for each in model.encoder.modules() if each._parameters]
    assert len(watched) == 16
    for each in watched:
        each.register_forward_hook(lambda module, *_: called.append(module))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.arange(8)[None]).last_hidden_state.requires_grad
    assert len(called) == 16 and set(called) == set(watched)


def test_a_compiled_block_is_one_graph_with_the_same_gradients() -> None:
    torch.manual_seed(1)
    block = rounded(MODELS["bert"]().encoder.layer[0]).train()
    WeightCopies(block)
    block.attention.self.config._attn_implementation = "sdpa"
    states, weights = (torch.randn(2, 12, 32).bfloat16() for _ in range(2))

    def gradients() -> list[Tensor | None]:
        block.zero_grad()
        torch.manual_seed(2)
        own = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            (block(own) * weights).sum().backward()
        return [own.grad, *(each.grad for each in block.parameters())]

    expected = gradients()
    block.compile(backend="aot_eager", fullgraph=True)
    for each, wanted in zip(gradients(), expected, strict=True):
        assert each is not None and wanted is not None and torch.equal(each, wanted)


def test_the_copies_of_joined_weights_follow_them() -> None:
    model = MODELS["bert"]()
    copies = WeightCopies(model)
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.fill_(number)
    copies.refresh()
    inner = model.encoder.layer[1].attention
    expected = torch.cat([each.weight for each in (inner.self.query, inner.self.key, inner.self.value)])
    assert torch.equal(inner.bf16_joined_copies["weight"], expected.bfloat16())


def test_the_sum_with_products_for_a_compiler_is_that_of_float64() -> None:
    rows, width = 6, 8
    summand, left = torch.randn(2, 3, width).bfloat16(), [torch.randn(rows, each).bfloat16() for each in (4, 5, 6)]
    right = torch.randn(15, width).bfloat16().split([4, 5, 6])
    for number in (1, 3):
        given = left[:number], right[:number]
        products = sum(one.double() @ other.double() for one, other in zip(*given, strict=True))
        got = sum_with_products(summand, *given)
        assert got.dtype == torch.bfloat16 and got.shape == summand.shape
        close(got, summand.double() + products.view_as(summand), f"{number} products")
