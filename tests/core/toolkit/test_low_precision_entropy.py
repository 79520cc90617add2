"""The loss of logits in bf16 and fp16: the values of float64, a gradient that is rounded once, no float32 copy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terakoya.toolkit.objectives import _low_precision_entropy
from terakoya.toolkit.objectives.cross_entropy import summed_cross_entropy_, summed_cross_entropy_and_z_


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits (50, 300) that require a gradient and labels (50,), every third of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(50, 300, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, 300, (50,), generator=generator)
    labels[::3] = -100
    return logits, labels


@pytest.mark.parametrize("at_once", [1 << 22, 2000, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("of_loss", "of_z"), [(0.25, 0.0), (1.0, 0.5), (0.0, 1.0)])
def test_it_equals_float64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_once: int, of_loss: float, of_z: float
) -> None:
    monkeypatch.setattr(_low_precision_entropy, "ELEMENTS_AT_ONCE", at_once)
    logits, labels = case(dtype)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, labels, ignore_index=-100, reduction="sum")
    squares = exact.logsumexp(1)[labels >= 0].square().sum()
    (want,) = torch.autograd.grad(of_loss * expected + of_z * squares, exact)
    if of_z:
        loss, z = summed_cross_entropy_and_z_(logits * 1, labels)
        assert abs(float(z.detach()) - float(squares.detach())) <= 2e-6 * float(squares.detach())
        total = of_loss * loss + of_z * z
    else:
        loss = summed_cross_entropy_(logits * 1, labels)
        total = of_loss * loss
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) - float(expected.detach())) <= 2e-6 * float(expected.detach())
    (got,) = torch.autograd.grad(total, logits)
    rounding = torch.finfo(dtype).eps / 2
    assert ((got.double() - want).abs() <= rounding * want.abs() * 1.01 + 1e-6 * of_loss + 1e-7).all()


def test_no_float32_array_of_the_logits_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_low_precision_entropy, "ELEMENTS_AT_ONCE", 3000)
    logits, labels = case(torch.bfloat16)
    sizes: list[int] = []
    convert = Tensor.float

    def watched(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return convert(tensor)

    monkeypatch.setattr(Tensor, "float", watched)
    summed_cross_entropy_(logits * 1, labels).backward()
    assert sum(size for size in sizes if size > 50) == 2 * 50 * 300, "forward and backward convert every logit once"
    assert max(sizes) <= 3000


def test_without_rows_the_loss_is_zero() -> None:
    logits = torch.empty(0, 30, dtype=torch.bfloat16, requires_grad=True)
    loss = summed_cross_entropy_(logits * 1, torch.empty(0, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == 0
    assert gradient.shape == (0, 30)


@pytest.mark.nightly
def test_what_a_gpu_compiles_computes_the_same() -> None:
    logits, labels = case(torch.bfloat16)
    used = labels != _low_precision_entropy.IGNORED
    share, both = 0.25 * used, 0.3 * used
    expected, of_labels = _low_precision_entropy.cross_entropy_rows(logits.detach(), labels)
    compiled = _low_precision_entropy._compile(_low_precision_entropy._rows)(logits.detach(), labels)
    assert torch.allclose(compiled[0], expected, rtol=1e-6) and torch.equal(compiled[1], of_labels)
    ours, theirs = logits.detach().clone(), logits.detach().clone()
    _low_precision_entropy.cross_entropy_gradient_(ours, labels, expected, both, share)
    _low_precision_entropy._compile(_low_precision_entropy._gradient)(theirs, labels, expected, both, share)
    assert ((ours.float() - theirs.float()).abs() <= 2**-8 * ours.float().abs() + 1e-6).all()
