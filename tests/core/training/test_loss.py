"""Global normalisation, and the means that are told."""

import pytest
import torch

from terakoya.components import Term
from terakoya.training.loss import Meter, weighted

TERMS = {"one": Term("tokens", 1.0), "two": Term("rows", 50.0), "accuracy": Term("tokens")}


def test_shares_add_up_to_the_loss_of_one_big_batch() -> None:
    pieces = [
        {"one": torch.tensor(6.0), "two": torch.tensor(1.0)},
        {"one": torch.tensor(2.0), "two": torch.tensor(3.0)},
    ]
    counts = {"tokens": 16, "rows": 8}
    assert sum(float(weighted(piece, TERMS, counts)) for piece in pieces) == pytest.approx(8 / 16 + 50 * 4 / 8)


def test_nothing_counted_is_exactly_nothing() -> None:
    parameter = torch.tensor(3.0, requires_grad=True)
    loss = weighted({"one": parameter * 2, "two": parameter * 5}, TERMS, {"tokens": 0, "rows": 0})
    loss.backward()
    assert float(loss.detach()) == 0.0 and float(parameter.grad) == 0.0  # type: ignore[arg-type]
    dummy = weighted({"one": parameter, "two": parameter}, TERMS, {"tokens": 4, "rows": 4}, factor=0.0)
    assert float(dummy.detach()) == 0.0


def test_means_are_over_all_that_was_added_since_the_last_time() -> None:
    meter = Meter(TERMS, torch.device("cpu"))
    for loss, tokens in ((4.0, 2), (8.0, 6)):
        meter.add_sums({"one": torch.tensor(loss), "two": torch.tensor(1.0)})
        meter.add_counts({"tokens": tokens, "rows": 1, "unused": 9})
    assert meter.take(meter.stacked()) == {"loss": 12 / 8 + 50 * 2 / 2, "one": 12 / 8, "two": 1.0}
    meter.add_sums({"accuracy": torch.tensor(3.0)})
    meter.add_counts({"tokens": 4, "rows": 0})
    assert meter.take(meter.stacked()) == {"loss": 0.0, "accuracy": 0.75}
