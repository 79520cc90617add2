"""Which members of a table of cases run at each change, and which at night; what a fixture has to make for those."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_night(cases: Iterable[Any], *, always: Iterable[Any]) -> list[Any]:
    """Returns `cases` as arguments of `parametrize`: those that are not in `always` are of `make nightly`. A case of
    several arguments is a tuple."""
    every_time = list(always)
    cases = list(cases)
    assert all(case in cases for case in every_time), "all of `always` are cases"
    return [
        case if case in every_time else pytest.param(*_arguments(case), marks=pytest.mark.nightly) for case in cases
    ]


def wanted(request: pytest.FixtureRequest, argument: str, test: str = "") -> list[Any]:
    """Returns the values of the parameter `argument` in the tests of the fixture's file that are run, in their order:
    what a fixture of that file has to make. With `test`, those of this test alone."""
    found: dict[Any, None] = {}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function) and test in ("", item.originalname):
            given = item.callspec.params if hasattr(item, "callspec") else {}
            found |= {given[argument]: None} if argument in given else {}
    return list(found)


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)  # a named tuple is one argument
