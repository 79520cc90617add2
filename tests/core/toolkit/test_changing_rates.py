"""Rates that change along the run."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from terakoya.toolkit.changing_rates import ChangingRate, Rate, largest_rate, rate_at


class Settings(BaseModel):
    rate: Rate = 0.15


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"start": 0.3, "end": 0.1}, [0.3, 0.25, 0.2, 0.15, 0.1]),
        ({"start": 0.1, "end": 0.3, "until": 0.5}, [0.1, 0.2, 0.3, 0.3, 0.3]),
        ({"start": 0.3, "end": 0.1, "shape": "cosine"}, [0.2 + 0.1 * math.cos(math.pi * k / 4) for k in range(5)]),
    ],
)
def test_a_rate_goes_from_start_to_end_and_stays_there(settings: dict[str, Any], expected: list[float]) -> None:
    rate = ChangingRate(**settings)
    got = [rate_at(rate, quarter / 4) for quarter in range(5)]
    assert all(abs(one - other) < 1e-12 for one, other in zip(got, expected, strict=True))
    assert got[-1] == rate.end, "exactly"
    assert largest_rate(rate) == max(settings["start"], settings["end"])


def test_a_number_is_a_rate_that_never_changes() -> None:
    assert [rate_at(0.2, progress) for progress in (0.0, 1.0)] == [0.2, 0.2]
    assert largest_rate(0.2) == 0.2


@pytest.mark.parametrize("value", [0.3, {"start": 0.3, "end": 0.15, "until": 0.5, "shape": "cosine"}])
def test_json_is_read_and_written_as_it_is(value: Any) -> None:
    settings = Settings.model_validate_json(json.dumps({"rate": value}), strict=True)
    assert settings.model_dump(mode="json") == {"rate": value}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, 'expected a number above 0 and below 1, or an object such as {"start": 0.3, "end": 0.15}, got 1.5'),
        (True, "above 0 and below 1, .* got true"),
        ({"start": 0.3}, "end: missing"),
        ({"start": 0.3, "end": 0.1, "untill": 0.5}, 'untill: unknown key; did you mean "until"'),
        ({"start": 0.3, "end": 0.0}, "end: expected greater than 0, got 0.0"),
    ],
)
def test_a_mistake_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({"rate": value})
