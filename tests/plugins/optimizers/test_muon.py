"""Muon and AdamW as one: the weights of each, and both updates against the published formulas in float64."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from terakoya_plugins.optimizers.muon import Muon, batched


class Small(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 6)])
        self.head = nn.Linear(6, 7, bias=False)


def orthogonal(gradient: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz iterations with the published coefficients."""
    wide = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
    each = wide / np.linalg.norm(wide)
    for _ in range(5):
        square = each @ each.T
        each = 3.4445 * each + (-4.7750 * square + 2.0315 * square @ square) @ each
    return each if gradient.shape[0] <= gradient.shape[1] else each.T


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_follows_both_published_updates(adjust: str) -> None:
    """Matrices of blocks: orthogonalised momentum, in bf16, so within a few per cent of the update; the rest: AdamW
    at its own learning rate, within float32's precision."""
    torch.manual_seed(0)
    module = Small()
    settings = Muon(learning_rate=0.02, adamw_learning_rate=0.005, weight_decay=0.1, adjust_lr_fn=adjust)
    optimizer = settings.build(module, fused=True)
    values = {name: value.detach().double().numpy().copy() for name, value in module.named_parameters()}
    moved = {name: np.zeros_like(value) for name, value in values.items()}
    first, second = (copy.deepcopy(moved) for _ in range(2))
    draw = np.random.default_rng(0)
    for step in (1, 2):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / step  # as the training loop sets the scheduled rate
        for name, parameter in module.named_parameters():
            gradient = draw.normal(size=values[name].shape)
            parameter.grad = torch.tensor(gradient, dtype=torch.float32)
            before = values[name].copy()
            if name in ("blocks.0.weight", "blocks.1.weight"):
                first[name] = 0.95 * first[name] + 0.05 * gradient
                update = orthogonal(0.95 * first[name] + 0.05 * gradient)
                tall, broad = gradient.shape
                size = max(1, tall / broad) ** 0.5 if adjust == "original" else 0.2 * max(tall, broad) ** 0.5
                values[name] = values[name] * (1 - 0.02 / step * 0.1) - 0.02 / step * size * update
            else:
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.95 * second[name] + 0.05 * gradient**2
                decay = 0.1 if values[name].ndim > 1 else 0.0
                upper, lower = first[name] / (1 - 0.9**step), second[name] / (1 - 0.95**step)
                values[name] = values[name] * (1 - 0.005 / step * decay) - 0.005 / step * upper / (
                    np.sqrt(lower) + 1e-8
                )
            moved[name] += np.abs(values[name] - before)
        optimizer.step()
    for name, parameter in module.named_parameters():
        error = np.abs(parameter.detach().numpy() - values[name])
        assert error.max() < (0.03 if name.endswith(("0.weight", "1.weight")) else 2e-5) * moved[name].max(), name
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}, "as the training loop set it"


def test_normuon_divides_by_each_neurons_root_mean_square_and_decay_is_cautious(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three steps in float32 beside the formulas of both papers in float64, (outputs, inputs) and transposed as GPT-2
    has them."""
    monkeypatch.setattr(batched, "multiplies_fast", lambda *_: False)
    draw = np.random.default_rng(0)
    for side in (False, True):
        weight = nn.Parameter(torch.tensor(draw.normal(size=(6, 4)), dtype=torch.float32))
        layer = Conv1D(4, 6) if side else nn.Linear(4, 6, bias=False)
        layer.weight = weight
        settings = Muon(
            learning_rate=0.1, weight_decay=0.5, neuron_beta=0.8, cautious_weight_decay=True, adjust_lr_fn="original"
        )
        optimizer = settings.build(nn.ModuleList([layer]), fused=False)
        values, momentum = weight.detach().double().numpy().copy(), np.zeros((6, 4))
        second: np.ndarray | float = 0.0
        for _ in range(3):
            gradient = draw.normal(size=(6, 4))
            weight.grad = torch.tensor(gradient, dtype=torch.float32)
            optimizer.step()
            momentum = 0.95 * momentum + 0.05 * gradient
            update = orthogonal(0.05 * gradient + 0.95 * momentum)
            second = 0.8 * second + 0.2 * (update**2).mean(0 if side else 1, keepdims=True)
            normalized = update / np.sqrt(second)
            normalized *= np.linalg.norm(update) / np.linalg.norm(normalized)
            decayed = np.where(normalized * values > 0, values * (1 - 0.1 * 0.5), values)
            outputs, inputs = (4, 6) if side else (6, 4)
            values = decayed - 0.1 * max(1, outputs / inputs) ** 0.5 * normalized
        assert np.abs(weight.detach().numpy() - values).max() < 1e-5


def test_embeddings_and_norms_have_rates_of_their_own() -> None:
    """Adam's first step is as large as its learning rate, whatever the gradient."""
    module = Small()
    optimizer = Muon(
        learning_rate=0.1, adamw_learning_rate=0.05, embedding_factor=10.0, norm_factor=0.2, weight_decay=0.0
    ).build(module, fused=False)
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    for each in module.parameters():
        each.grad = torch.ones_like(each)
    for group in optimizer.param_groups:
        group["lr"] = 0.2  # twice the peak, as a schedule would set it
    optimizer.step()
    moved = {name: (before[name] - value.detach()).mean().item() for name, value in module.named_parameters()}
    for name, rate in {"embedding.weight": 1.0, "head.weight": 0.02, "blocks.0.bias": 0.02}.items():
        assert moved[name] == pytest.approx(rate, rel=1e-4), name


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_updates_of_gpt2s_matrices_are_those_of_linear_ones_transposed(adjust: str) -> None:
    """GPT-2's weights are (inputs, outputs). Two layers that compute the same stay so, and follow float64's update."""
    draw = torch.Generator().manual_seed(0)
    for linear, gpt2 in ((nn.Linear(4, 16), Conv1D(16, 4)), (nn.Linear(16, 4), Conv1D(4, 16))):
        gradient = torch.randn(linear.weight.shape, generator=draw)
        start = linear.weight.detach().double().numpy().copy()
        gpt2.weight.data.copy_(linear.weight.T)
        linear.weight.grad, gpt2.weight.grad = gradient, gradient.T.clone()
        settings = Muon(learning_rate=0.02, weight_decay=0.1, adjust_lr_fn=adjust)
        for each in (linear, gpt2):
            settings.build(nn.ModuleList([each]), fused=False).step()
        outputs, inputs = gradient.shape
        size = max(1, outputs / inputs) ** 0.5 if adjust == "original" else 0.2 * 16**0.5
        update = 0.02 * size * orthogonal((0.95 * 0.05 + 0.05) * gradient.double().numpy())
        for weight in (linear.weight, gpt2.weight.T):
            error = np.abs(weight.detach().double().numpy() - (start * (1 - 0.02 * 0.1) - update)).max()
            assert error < 0.03 * np.abs(update).max()


def names_of_muon_weights(module: nn.Module) -> set[str]:
    optimizer = Muon().build(module, fused=False)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(each)] for group in optimizer.param_groups if "momentum" in group for each in group["params"]}


def test_embeddings_heads_norms_and_biases_are_adamws() -> None:
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(**sizes, intermediate_size=16))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=8, n_layer=2, n_head=2))
    llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16, tie_word_embeddings=False))
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight
    assert {len(names_of_muon_weights(model)) for model in (bert,)} == {12}, "6 matrices a layer"
    assert len(names_of_muon_weights(gpt2)) == 8 and len(names_of_muon_weights(llama)) == 14
    for model in (bert, gpt2, llama):
        assert all(".layer." in name or ".h." in name or ".layers." in name for name in names_of_muon_weights(model))
    plain = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    assert names_of_muon_weights(plain) == {"1.weight"}, (
        "without blocks: neither the embedding nor weights of its shape"
    )


def test_state_dict_has_both_states() -> None:
    torch.manual_seed(0)
    module = Small()
    gradients = [[torch.randn_like(each) for each in module.parameters()] for _ in range(4)]
    optimizer = Muon(learning_rate=0.01).build(module, fused=False)

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer, chosen: list[list[torch.Tensor]]) -> None:
        for gradient in chosen:
            for parameter, value in zip(module.parameters(), gradient, strict=True):
                parameter.grad = value
            optimizer.step()

    steps(module, optimizer, gradients[:2])
    again = copy.deepcopy(module)
    restored = Muon(learning_rate=0.01).build(again, fused=False)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(restored.state) == len(list(again.parameters()))
    for pair in ((module, optimizer), (again, restored)):
        steps(*pair, gradients[2:])
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), again.parameters(), strict=True))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_frozen_matrices_are_left_out() -> None:
    module = Small()
    module.blocks[0].requires_grad_(False)
    assert names_of_muon_weights(module) == {"blocks.1.weight"}
    module.blocks.requires_grad_(False)
    assert names_of_muon_weights(module) == set(), "AdamW alone"


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_stacks_of_matrices_are_updated_as_one_by_one(
    adjust: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on a GPU, beside torch's Muon; two of the four equal matrices do not fit into one stack."""
    monkeypatch.setattr(batched, "MOST_AT_ONCE", 3 * 6 * 4)
    draw = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (4, 6), (6, 4), (6, 4), (6, 4), (5, 5)]
    ours, theirs = ([nn.Parameter(torch.randn(each, generator=draw)) for each in shapes] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        mine.data.copy_(other.data)
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
    stacked, plain = batched.BatchedMuon(ours, **settings), torch.optim.Muon(theirs, **settings)  # type: ignore[arg-type]
    before = [each.detach().clone() for each in theirs]
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=draw)
            other.grad = mine.grad.clone()
        batched.step_by_shape(stacked.param_groups[0], stacked.state, None)
        plain.step()
    for mine, other, start in zip(ours, theirs, before, strict=True):
        assert (mine - other).norm() < 0.02 * (other - start).norm()
        assert torch.equal(stacked.state[mine]["momentum_buffer"], plain.state[other]["momentum_buffer"])


def test_a_step_that_is_skipped_on_the_device_changes_no_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    matrix = nn.Parameter(torch.randn(6, 4, generator=draw))
    optimizer = batched.BatchedMuon([matrix], lr=0.1)
    matrix.grad = torch.randn(6, 4, generator=draw)
    batched.step_by_shape(optimizer.param_groups[0], optimizer.state, torch.tensor(0.0))
    weights, momentum = matrix.detach().clone(), optimizer.state[matrix]["momentum_buffer"].clone()
    matrix.grad[0, 0], matrix.grad[1, 1] = float("nan"), float("inf")
    batched.step_by_shape(optimizer.param_groups[0], optimizer.state, torch.tensor(1.0))
    assert torch.equal(matrix, weights) and torch.equal(optimizer.state[matrix]["momentum_buffer"], momentum)
