"""A head with further columns: the same losses and gradients as plain Transformers, and weights as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from terakoya.toolkit.objectives import padded_head as padding
from terakoya.toolkit.objectives._causal_module import CausalModule
from terakoya.toolkit.objectives.columns import Columns
from terakoya.toolkit.objectives.cross_entropy import (
    summed_cross_entropy_,
    summed_cross_entropy_and_odds_,
    summed_cross_entropy_and_z_,
)
from terakoya.toolkit.objectives.padded_head import padded_head
from terakoya_plugins.architectures.bert import Bert
from terakoya_plugins.architectures.gpt2 import GPT2
from terakoya_plugins.objectives.masked_lm.module import MaskedLMModule

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 67}
ODD, PADDED = 67, 128


@pytest.fixture(autouse=True)
def also_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(padding, "DEVICES", ("cpu",))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of each product with a vocabulary's weight."""
    seen: list[int] = []
    linear = F.linear

    def watched(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(weight) >= ODD:
            seen.append(len(weight))
        return linear(hidden, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    return seen


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
def test_further_columns_count_nothing(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    leaf = (3 * torch.randn(9, PADDED, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, ODD, (9,))
    labels[::3] = -100
    own = leaf[:, :ODD] if dtype != torch.bfloat16 else leaf[:, :ODD].double()
    plain = F.cross_entropy(own, labels, reduction="sum")
    z = (own.logsumexp(1) * (labels >= 0)).square().sum()
    for ours, expected in (
        (summed_cross_entropy_(leaf * 1, labels, Columns(ODD)), plain),
        (summed_cross_entropy_and_odds_(leaf * 1, labels, Columns(ODD))[0], plain),
        (sum(summed_cross_entropy_and_z_(leaf * 1, labels, Columns(ODD))), plain + z),
    ):
        assert isinstance(ours, Tensor)
        assert abs(ours.item() - expected.item()) <= tolerance * expected.item()
        (got,) = torch.autograd.grad(ours, leaf)
        (want,) = torch.autograd.grad(expected, leaf, retain_graph=True)
        assert (got - want).norm() <= tolerance * want.norm()
        assert not got[:, ODD:].any()
    assert summed_cross_entropy_and_odds_(leaf * 1, labels, Columns(ODD))[1].shape == (9, ODD)
    with torch.no_grad():
        assert summed_cross_entropy_(leaf.clone(), labels, Columns(ODD)).item() == pytest.approx(
            plain.item(), rel=tolerance
        )


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("head_positions", "z_loss"), [(None, False), (5, False), (5, True)])
def test_a_causal_model_equals_transformers(
    dtype: torch.dtype, tolerance: float, head_positions: int | None, z_loss: bool, widths: list[int]
) -> None:
    torch.manual_seed(0)
    names = {"n_positions": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**SIZES, **names)).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids, labels = torch.randint(0, ODD, (2, 3, 12)).unbind()
    positions = torch.arange(12).expand(3, 12)
    batch = {"input_ids": ids, "position_ids": positions, "document_ids": torch.zeros_like(ids), "labels": labels}
    logits = model(ids).logits.flatten(0, 1)
    plain = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    expected = plain + (logits.logsumexp(1).square().sum() if z_loss else 0.0)
    wanted = gradients(model, expected)
    widths.clear()
    sums = CausalModule(GPT2(), model, z_loss=z_loss, head_positions=head_positions)(batch)
    total = torch.stack(list(sums.values())).sum()
    assert total.item() == pytest.approx(expected.item(), rel=tolerance)
    found = gradients(model, total)
    assert set(widths) == {PADDED}
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert (found[name] - each).norm() <= tolerance * each.norm(), name
    assert "forward" not in model.lm_head.__dict__
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_masked_model_equals_transformers(dtype: torch.dtype, tolerance: float, widths: list[int]) -> None:
    """Its head has a bias."""
    torch.manual_seed(0)
    dropouts: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(**SIZES, intermediate_size=16, **dropouts)).to(dtype)
    ids = torch.randint(0, ODD, (3, 12))
    positions, labels = torch.tensor([0, 5, 17, 30]), torch.tensor([3, 66, 9, -100])
    expected = F.cross_entropy(model(ids).logits.flatten(0, 1)[positions], labels, ignore_index=-100, reduction="sum")
    wanted = gradients(model, expected)
    batch = {
        "input_ids": ids, "position_ids": torch.arange(12).expand(3, 12), "document_ids": torch.zeros_like(ids),
        "masked_positions": positions, "masked_labels": labels,
    }  # fmt: skip
    module = MaskedLMModule(Bert(), model, next_sentence=False)
    widths.clear()
    found = gradients(model, module(batch)["mlm_loss"])
    assert set(widths) == {PADDED}
    for name, each in wanted.items():
        assert (found[name] - each).norm() <= tolerance * (each.norm() + 1e-3), name  # that of key.bias is 0
    module.eval()
    with torch.no_grad():
        assert module(batch)["mlm_loss"].item() == pytest.approx(expected.item(), rel=tolerance)
    assert widths[-1] == ODD


def test_parts_of_the_positions_share_a_padded_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Linear] = []

    class Counted(padding._PaddedForward):
        def __init__(self, head: nn.Linear) -> None:
            super().__init__(head)
            made.append(head)

    monkeypatch.setattr(padding, "_PaddedForward", Counted)
    ids = torch.randint(0, ODD, (3, 12))
    batch = {"input_ids": ids, "position_ids": torch.arange(12).expand(3, 12), "document_ids": 0 * ids, "labels": ids}
    model = GPT2LMHeadModel(GPT2Config(**SIZES, n_positions=12))
    CausalModule(GPT2(), model, z_loss=False, head_positions=5)(batch)["lm_loss"].backward()
    assert len(made) == 1


def test_what_is_not_padded() -> None:
    def classes(vocabulary: int) -> int | None:
        model = GPT2LMHeadModel(GPT2Config(**{**SIZES, "vocab_size": vocabulary}))
        with padded_head(model) as found:
            return found and found.classes

    assert [classes(each) for each in (63, 64, 65, 128)] == [63, None, 65, None]
    with torch.no_grad():
        assert classes(63) is None
    torch.backends.cuda.matmul.allow_tf32 = False
    assert classes(63) is None, "float32 products without tf32 take no Tensor Cores"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert classes(63) == 63


def test_autocast_casts_and_pads_in_one_pass() -> None:
    model = GPT2LMHeadModel(GPT2Config(**SIZES))
    with torch.autocast("cpu", dtype=torch.bfloat16), padded_head(model), padded_head(model) as columns:
        assert columns == Columns(ODD)
        hidden = torch.randn(4, 16, dtype=torch.bfloat16)
        logits = model.lm_head(hidden)
        assert logits.shape == (4, PADDED) and logits.dtype == torch.bfloat16 and not logits[:, ODD:].any()
        weight = model.lm_head.weight
        assert torch.equal(logits[:, :ODD], hidden @ weight.T)
        first = model.lm_head.forward.padded
        model.lm_head(hidden)
        assert first is not None and model.lm_head.forward.padded is first
    logits.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
