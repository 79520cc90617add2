"""Sampling from weights: the correct distribution, which depends only on the row's own random number."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from terakoya.toolkit.objectives.columns import VocabularyPart
from terakoya.toolkit.objectives.sampling import BLOCK, draw, triangle_sums
from terakoya.toolkit.random_keys import numbers, streams
from terakoya_contract.partition import ThreadGroup, ThreadSum


def uniforms(count: int, key: int = 7) -> torch.Tensor:
    """Uniform numbers from keys, as objectives compute them."""
    stream = streams(np.array([key], np.uint64), "sample")
    return torch.from_numpy((numbers(stream, np.arange(count)) >> np.uint64(12)) * 2.0**-52)


@pytest.mark.parametrize("classes", [5, BLOCK, BLOCK + 1, 300, 32_768])
def test_class_frequencies_are_those_of_the_weights(classes: int) -> None:
    """A chi-square test over classes, with rare classes merged: the statistic is within five deviations of its mean."""
    draws = 40_000
    logits = torch.randn(classes, generator=torch.Generator().manual_seed(1)) * 2
    odds = (logits - logits.max()).exp()
    uniform = uniforms(draws)
    seen = torch.zeros(classes)
    for part in uniform.split(2000):
        seen += torch.bincount(draw(odds.expand(len(part), classes), part), minlength=classes)
    expected = logits.double().softmax(0).numpy() * draws
    order = np.argsort(expected)
    groups = np.minimum(np.floor(expected[order].cumsum() / 20), draws)  # each group is expected 20 times or more
    _, group = np.unique(groups, return_inverse=True)
    want = np.bincount(group, expected[order])
    got = np.bincount(group, seen.numpy()[order])
    freedom = len(want) - 1
    statistic = float(((got - want) ** 2 / want).sum())
    assert freedom > 3 and abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_it_agrees_with_the_largest_of_logits_plus_gumbel_noise() -> None:
    """The other exact method has the same frequencies, within statistical error."""
    draws, logits = 200_000, torch.tensor([2.0, 0.0, -1.0, -4.0])
    gumbel = -(-torch.rand(draws, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log()).log()
    theirs = torch.bincount((logits + gumbel).argmax(1), minlength=4) / draws
    ours = torch.bincount(draw(logits.exp().expand(draws, 4), uniforms(draws)), minlength=4) / draws
    assert ((ours - theirs).abs() < 5 * (theirs / draws * 2).sqrt()).all(), (ours, theirs)


def test_the_smallest_weights_are_sampled_too() -> None:
    """One class of 1, 1,000 of 1e-9: float32 noise, or a cumulative sum in float32, would never sample those."""
    weights = torch.full((1, 1001), 1e-9)
    weights[0, 0] = 1.0
    share = 1e-6 / (1 + 1e-6)
    uniform = torch.linspace(1 - share, 1 - 2.0**-52, 500, dtype=torch.float64)[1:]
    drawn = draw(weights.expand(len(uniform), -1), uniform)
    assert drawn.min() >= 1 and len(drawn.unique()) > 400
    assert (drawn.diff() >= 0).all(), "in the order of the classes"


@pytest.mark.parametrize("classes", [3, BLOCK, 2 * BLOCK + 5])
def test_a_class_without_weight_is_never_sampled(classes: int) -> None:
    weights = torch.zeros(4, classes)
    weights[:, [1, -2]] = torch.tensor([0.25, 1.0])
    uniform = torch.tensor([0.0, 0.2 - 1e-9, 0.2 + 1e-9, 1 - 2.0**-52], dtype=torch.float64)
    first, second = 1, classes - 2
    if first == second:
        assert draw(weights, uniform).tolist() == [1] * 4
    else:
        assert draw(weights, uniform).tolist() == [first, first, second, second]


def test_the_result_does_not_depend_on_other_rows() -> None:
    weights = torch.rand(50, 1000, generator=torch.Generator().manual_seed(2)) ** 8
    uniform = uniforms(50)
    together = draw(weights, uniform)
    alone = torch.cat([draw(weights[row : row + 1], uniform[row : row + 1]) for row in range(50)])
    assert torch.equal(together, alone)
    assert torch.equal(draw(weights.flip(0), uniform.flip(0)).flip(0), together)


@pytest.mark.parametrize("first", [1, 130, 299])
def test_parts_of_the_classes_sample_what_one_process_samples(first: int) -> None:
    """The first part ends at `first`; a row has no weight in it, and one none in the other."""
    rows, classes = 4000, 300
    weights = torch.rand(rows, classes, generator=torch.Generator().manual_seed(2), dtype=torch.float64) ** 8
    weights[0, :first], weights[1, first:] = 0.0, 0.0
    uniform, thread_sum = uniforms(rows), ThreadSum()

    def work(index: int) -> torch.Tensor:
        begin, end = ((0, first), (first, classes))[index]
        part = VocabularyPart(begin, end - begin, classes, ThreadGroup(index, 2, thread_sum))
        return draw(weights[:, begin:end], uniform, part)

    with ThreadPoolExecutor(2) as pool:
        drawn, other = pool.map(work, range(2))
    assert torch.equal(drawn, other)
    assert drawn[0] >= first > drawn[1]
    assert torch.equal(drawn, draw(weights, uniform))


def test_sums_by_a_triangle_are_cumulative_sums() -> None:
    values = torch.rand(50, 257, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(triangle_sums(values), values.cumsum(1), rtol=1e-14, atol=0.0)
