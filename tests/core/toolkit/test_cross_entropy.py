"""Cross entropy in place has torch's values and gradients, in one array."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from terakoya.toolkit.objectives.cross_entropy import (
    summed_cross_entropy_,
    summed_cross_entropy_and_odds_,
    summed_cross_entropy_and_z_,
)


def case(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (rows, 8), weights (classes, 8) and labels (rows,), every third of them ignored."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, 8, dtype=dtype, requires_grad=True)
    weight = (3 * torch.randn(classes, 8, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, classes, (rows,))
    labels[::3] = -100
    return hidden, weight, labels


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
def test_it_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = case(20, 300, dtype)
    expected = F.cross_entropy(
        (hidden @ weight.T).float() if dtype == torch.bfloat16 else hidden @ weight.T, labels, reduction="sum"
    )
    expected_gradients = torch.autograd.grad(0.25 * expected, [hidden, weight])
    loss = summed_cross_entropy_(hidden @ weight.T, labels)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(loss.item() - expected.item()) <= tolerance * expected.item()
    for got, want in zip(torch.autograd.grad(0.25 * loss, [hidden, weight]), expected_gradients, strict=True):
        assert (got - want).norm() <= tolerance * want.norm()
    with torch.no_grad():
        logits = hidden @ weight.T
        kept = logits.clone()
        assert torch.equal(
            summed_cross_entropy_(logits, labels), F.cross_entropy(kept.to(loss.dtype), labels, reduction="sum")
        )
        assert torch.equal(logits, kept), "without a gradient the logits are unchanged"


@pytest.mark.parametrize("summed", [summed_cross_entropy_, summed_cross_entropy_and_odds_, summed_cross_entropy_and_z_])
@pytest.mark.parametrize(("label", "dtype"), [(-1, torch.float32), (300, torch.float32), (300, torch.bfloat16)])
def test_a_label_that_is_no_class_is_an_error_as_in_torch(summed: Any, label: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = case(20, 300, dtype)
    labels[1] = label
    with pytest.raises(IndexError, match="Target"):
        F.cross_entropy(hidden @ weight.T, labels)
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        summed(hidden @ weight.T, labels)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize(("of_loss", "of_z"), [(0.25, 0.5), (1.0, 0.0), (0.0, 1.0), (1.0, None), (None, 1.0)])
def test_z_equals_its_formula(dtype: torch.dtype, tolerance: float, of_loss: float | None, of_z: float | None) -> None:
    hidden, weight, labels = case(20, 300, dtype)

    def total(loss: Tensor, z: Tensor) -> Tensor:
        parts = [each * factor for each, factor in ((loss, of_loss), (z, of_z)) if factor is not None]
        return torch.stack(parts).sum()

    logits = hidden @ weight.T
    cross_entropy = F.cross_entropy(logits, labels, reduction="sum")
    squares = logits[labels >= 0].exp().sum(1).log().square().sum()
    expected = torch.autograd.grad(total(cross_entropy, squares), [hidden, weight])
    loss, z = summed_cross_entropy_and_z_(hidden @ weight.T, labels)
    assert abs(loss.item() - cross_entropy.item()) <= tolerance * cross_entropy.item()
    assert abs(z.item() - squares.item()) <= tolerance * squares.item()
    for got, want in zip(torch.autograd.grad(total(loss, z), [hidden, weight]), expected, strict=True):
        assert (got - want).norm() <= tolerance * want.norm()
    with torch.no_grad():
        loss, z = summed_cross_entropy_and_z_(hidden @ weight.T, labels)
    assert abs(z.item() - squares.item()) <= tolerance * squares.item()
    assert abs(loss.item() - cross_entropy.item()) <= tolerance * cross_entropy.item()


def test_without_labels_loss_and_gradient_are_zero() -> None:
    hidden, weight, labels = case(5, 30, torch.float32)
    loss = summed_cross_entropy_(hidden @ weight.T, torch.full_like(labels, -100))
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, [hidden, weight]))


def test_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1000.0, -1000.0, 999.0]], requires_grad=True)
    loss = summed_cross_entropy_(logits * 1, torch.tensor([2]))
    assert float(loss.detach()) == pytest.approx(1.3132617, abs=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, torch.tensor([[0.7310586, 0.0, -0.7310586]]), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_runs_once(dtype: torch.dtype) -> None:
    hidden, weight, labels = case(5, 30, dtype)
    loss = summed_cross_entropy_(hidden @ weight.T, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwriting_logits_that_their_operation_needs_is_an_error(dtype: torch.dtype) -> None:
    hidden, weight, labels = case(5, 30, dtype)
    with pytest.raises(RuntimeError, match="inplace"):
        summed_cross_entropy_(torch.tanh(hidden @ weight.T), labels).backward()


def test_one_array_of_the_logits_size() -> None:
    hidden, weight, labels = case(64, 512, torch.float32)
    arrays: dict[int, Tensor] = {}  # held, so that no address comes twice

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape == (64, 512):
                arrays[out.untyped_storage().data_ptr()] = out
            return out

    with Watch():
        summed_cross_entropy_(hidden @ weight.T, labels).backward()
    assert len(arrays) == 1
    with Watch():
        F.cross_entropy(hidden @ weight.T, labels, reduction="sum").backward()
    assert len(arrays) >= 3, "the watch sees torch's own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_odds_are_the_softmax_times_a_factor(training: bool, dtype: torch.dtype) -> None:
    """The largest of each row is exactly 1, they have no gradient, and the gradient of the loss is unchanged."""
    labels = torch.tensor([3, -100, 0, 6])
    start = torch.randn(4, 7, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_(training)
    loss, odds = summed_cross_entropy_and_odds_(start * 3, labels)
    assert not odds.requires_grad and odds.dtype == torch.float32
    assert torch.allclose(odds / odds.sum(1, keepdim=True), (start.detach() * 3).float().softmax(1))
    assert torch.equal(odds.amax(1), torch.ones(4))
    expected = torch.nn.functional.cross_entropy((start * 3).float(), labels, ignore_index=-100, reduction="sum")
    assert torch.allclose(loss, expected)
    if training:
        (theirs,) = torch.autograd.grad(expected, start)
        (ours,) = torch.autograd.grad(loss, start)
        assert torch.allclose(ours, theirs, atol=1e-5 if dtype == torch.float32 else 2e-2)
