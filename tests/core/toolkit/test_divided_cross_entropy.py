"""Cross entropy over a vocabulary that two threads divide has the values and gradients of torch's over all of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terakoya.toolkit.objectives.columns import Columns, VocabularyPart, most_likely
from terakoya.toolkit.objectives.cross_entropy import (
    summed_cross_entropy_,
    summed_cross_entropy_and_odds_,
    summed_cross_entropy_and_z_,
)
from terakoya_contract.partition import ThreadGroup, ThreadSum

ROWS, CLASSES, FIRST = 40, 301, 151
"""The first part has more classes than the second."""
WIDTH = 192
"""Columns of each padded part."""


def in_parts(work: Callable[[VocabularyPart], Any]) -> list[Any]:
    """What `work` returns for each part."""
    thread_sum = ThreadSum()

    def one(index: int) -> Any:
        first, last = ((0, FIRST), (FIRST, CLASSES))[index]
        with torch.enable_grad():
            return work(VocabularyPart(first, last - first, CLASSES, ThreadGroup(index, 2, thread_sum)))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits (ROWS, CLASSES) and labels (ROWS,), every third of them ignored."""
    torch.manual_seed(0)
    logits = (6 * torch.randn(ROWS, CLASSES, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, (ROWS,))
    labels[::3] = -100
    return logits, labels


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of torch's cross entropy and half of the sum of log^2 Z."""
    z = (logits.logsumexp(1) * (labels != -100)).square().sum()
    return F.cross_entropy(logits, labels, reduction="sum") + 0.5 * z


def divided(logits: Tensor, labels: Tensor, columns: Columns) -> Tensor:
    """The same of a part of the columns."""
    loss, z = summed_cross_entropy_and_z_(logits, labels, columns)
    return loss + 0.5 * z


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("z", [False, True])
def test_values_and_gradients_are_those_of_one_process(
    dtype: torch.dtype, tolerance: float, padded: bool, z: bool
) -> None:
    logits, labels = case(dtype)
    exact = logits.detach().double().requires_grad_()
    expected = plain(exact, labels) if z else F.cross_entropy(exact, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(0.25 * expected, exact)

    def work(part: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
        own = logits.detach()[:, part.first : part.first + part.count].clone()
        leaf = F.pad(own, (0, WIDTH - part.count), value=9.0) if padded else own
        leaf.requires_grad_()
        loss_of, columns = divided if z else summed_cross_entropy_, Columns(part.count, part)
        loss = loss_of(leaf * 1, labels, columns)
        with torch.no_grad():
            unchanged = leaf.clone()
            evaluated = loss_of(unchanged, labels, columns)
            assert torch.equal(unchanged, leaf)
        (found,) = torch.autograd.grad(0.25 * loss, leaf)
        return loss.detach(), evaluated, found

    (first, in_evaluation, left), (second, _, right) = in_parts(work)
    assert torch.equal(first, second), "every process has the same loss"
    assert abs(first.double() - expected) <= tolerance * expected
    assert abs(in_evaluation.double() - expected) <= tolerance * expected
    found = torch.cat([left[:, :FIRST], right[:, : CLASSES - FIRST]], 1)
    assert (found.double() - gradient).norm() <= tolerance * gradient.norm()
    assert not left[:, FIRST:].any() and not right[:, CLASSES - FIRST :].any()


def test_odds_are_relative_to_the_largest_of_all_parts() -> None:
    logits, labels = case(torch.float64)
    expected = (logits - logits.amax(1, keepdim=True)).exp().detach()

    def work(part: VocabularyPart) -> tuple[Tensor, Tensor]:
        own = logits.detach()[:, part.first : part.first + part.count].clone().requires_grad_()
        columns = Columns(part.count, part)
        odds = summed_cross_entropy_and_odds_(own * 1, labels, columns)[1].clone()
        with torch.no_grad():
            return odds, summed_cross_entropy_and_odds_(own.clone(), labels, columns)[1]

    for parts in zip(*in_parts(work), strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-12, atol=0)


def test_the_most_likely_id_is_that_of_the_whole_row() -> None:
    """Also where ids of two parts are equally likely, or several of one."""
    logits = case(torch.float32)[0].detach()
    logits[0, [7, 290]] = 99.0
    logits[1, [200, 290]] = 99.0
    expected = logits.argmax(1)
    assert expected[:2].tolist() == [7, 200] and 0 < int((expected < FIRST).sum()) < ROWS

    def work(part: VocabularyPart) -> list[int]:
        own = F.pad(logits[:, part.first : part.first + part.count], (0, 20), value=200.0)
        return most_likely(own, Columns(part.count, part)).tolist()

    assert in_parts(work) == [expected.tolist()] * 2


@pytest.mark.parametrize("label", [-1, CLASSES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_label_that_is_no_class_is_an_error(label: int, dtype: torch.dtype) -> None:
    logits, labels = case(dtype)
    labels[1] = label

    def work(part: VocabularyPart) -> str:
        own = logits.detach()[:, part.first : part.first + part.count].clone().requires_grad_()
        try:
            summed_cross_entropy_(own * 1, labels, Columns(part.count, part))
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("is out of bounds" in message for message in in_parts(work))
