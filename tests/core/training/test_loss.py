"""Global normalisation, and the means that are logged."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from terakoya.components import LossTerm
from terakoya.training.loss import Meter, weighted_loss

TERMS = {"one": LossTerm("tokens", 1.0), "two": LossTerm("rows", 50.0), "accuracy": LossTerm("tokens")}


def test_contributions_add_up_to_the_loss_of_one_big_batch() -> None:
    micro_batches = [
        {"one": torch.tensor(6.0), "two": torch.tensor(1.0)},
        {"one": torch.tensor(2.0), "two": torch.tensor(3.0)},
    ]
    counts = {"tokens": 16, "rows": 8}
    assert sum(float(weighted_loss(sums, TERMS, counts)) for sums in micro_batches) == pytest.approx(
        8 / 16 + 50 * 4 / 8
    )


def test_a_count_of_zero_and_a_dummy_give_exactly_zero() -> None:
    parameter = torch.tensor(3.0, requires_grad=True)
    loss = weighted_loss({"one": parameter * 2, "two": parameter * 5}, TERMS, {"tokens": 0, "rows": 0})
    loss.backward()
    assert float(loss.detach()) == 0.0 and float(parameter.grad) == 0.0  # type: ignore[arg-type]
    dummy = weighted_loss({"one": parameter, "two": parameter}, TERMS, {"tokens": 4, "rows": 4}, factor=0.0)
    assert float(dummy.detach()) == 0.0


def test_a_loss_that_is_not_finite_spoils_gradients_that_do_not_depend_on_its_value() -> None:
    parameter = torch.tensor(3.0, requires_grad=True)
    sums = {"one": parameter * 2 + torch.tensor(float("nan")), "two": parameter}
    weighted_loss(sums, TERMS, {"tokens": 4, "rows": 4}).backward()
    assert not bool(torch.isfinite(parameter.grad))  # type: ignore[arg-type]


def test_means_are_over_all_sums_since_the_last_time() -> None:
    meter = Meter(TERMS, torch.device("cpu"))
    for loss, tokens in ((4.0, 2), (8.0, 6)):
        meter.add_sums({"one": torch.tensor(loss), "two": torch.tensor(1.0)})
        meter.add_counts({"tokens": tokens, "rows": 1, "unused": 9})
    assert meter.take_means(meter.local_sums()) == {"loss": 12 / 8 + 50 * 2 / 2, "one": 12 / 8, "two": 1.0}
    meter.add_sums({"accuracy": torch.tensor(3.0)})
    meter.add_counts({"tokens": 4, "rows": 0})
    assert meter.take_means(meter.local_sums()) == {"loss": 0.0, "accuracy": 0.75}


def test_averages_go_on_with_the_same_terms_only() -> None:
    """Of as many terms, too: the sums of one must not become those of another."""
    meters = [
        Meter({name: LossTerm(count=count) for name, count in terms.items()}, torch.device("cpu"))
        for terms in ({"loss": "tokens"}, {"other": "tokens"}, {"loss": "rows"}, {"loss": "tokens", "z_loss": "tokens"})
    ]
    found = [[meter.has_terms_of(other.state()) for other in meters] for meter in meters]
    assert found == [[one is other for other in meters] for one in meters]


def test_counts_keep_the_order_of_the_terms() -> None:
    """A checkpoint's bytes are the same in each process: the order of a set is not."""
    names = [f"count {number}" for number in range(20)]
    terms = {f"term {name}": LossTerm(count=name) for name in names}
    assert list(Meter(terms, torch.device("cpu")).state()["counts"]) == names


def test_bins_are_summed_and_the_objective_derives_metrics_from_them() -> None:
    """A histogram has no mean: the objective derives metrics from the sums of all ranks since the last time."""
    terms = {"one": LossTerm("tokens", 1.0), "bins": LossTerm("rows", bins=3), "unseen": LossTerm("rows", bins=2)}
    received = []

    def derive_metrics(sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> dict[str, float]:
        received.append((sorted(sums), dict(counts)))
        return {"share": float(sums["bins"][2] / sums["bins"].sum())}

    def meter() -> Meter:
        return Meter(terms, torch.device("cpu"), derive_metrics)

    first, second = meter(), meter()
    first.add_sums({"one": torch.tensor(4.0), "bins": torch.tensor([1.0, 0.0, 3.0])})
    second.add_sums({"one": torch.tensor(2.0), "bins": torch.tensor([5.0, 0.0, 1.0])})
    first.add_counts({"tokens": 3, "rows": 0})
    resumed = meter()
    resumed.add_state_sums(first.state()["sums"])
    resumed.counts, resumed.seen = first.state()["counts"], set(first.state()["seen"])
    assert torch.equal(resumed.local_sums(), first.local_sums()) and first.local_sums().shape == (6,)
    expected = {"loss": 2.0, "one": 2.0, "share": 0.4}
    assert resumed.take_means(first.local_sums() + second.local_sums()) == expected
    assert received == [(["bins", "one"], {"tokens": 3, "rows": 0})]
    assert not resumed.local_sums().any(), "sums are reset"
