"""Every registered component passes the checks of its kind, and the components work together.

The other files here show that each check fails for a broken component.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from selection import at_night

import terakoya_contract as contract
from terakoya.plugins import Registration, load
from terakoya_contract import training

REGISTERED = load().components()


def _names(kind: str) -> list[str]:
    return [component.name for component in REGISTERED if component.kind == kind]


@pytest.mark.parametrize(
    "component",
    at_night(
        REGISTERED,
        always=[each for each in REGISTERED if each.kind != "architectures" or each.name in ("bert", "t5")],
    ),
    ids=lambda component: f"{component.kind}-{component.name}",
)
def test_a_component_passes_the_checks_of_its_kind(component: Registration) -> None:
    results = list(contract.check_component(component, train=False))
    assert [str(result) for result in results if result.status not in ("passed", "skipped")] == []
    assert sum(result.status == "passed" for result in results) >= 6


PAIRS = list(itertools.product(_names("objectives"), _names("architectures")))
EACH_TIME = [
    ("masked_lm", "modernbert"), ("replaced_token", "electra"),
    ("causal_lm", "bert"),  # refused: it has no causal head
]  # fmt: skip
"""An encoder and two models; all pairs are tried at night."""


@pytest.mark.parametrize(("objective", "architecture"), at_night(PAIRS, always=EACH_TIME))
def test_it_learns_resumes_exports_and_loads(architecture: str, objective: str, tmp_path: Path) -> None:
    _run(tmp_path, architectures=architecture, objectives=objective)


@pytest.mark.parametrize("optimizer", at_night(_names("optimizers"), always=["muon"]))
def test_an_optimizer_learns_and_resumes(optimizer: str, tmp_path: Path) -> None:
    _run(tmp_path, optimizers=optimizer)


@pytest.mark.parametrize("schedule", at_night(_names("schedules"), always=["plateau"]))
def test_a_schedule_learns_and_resumes(schedule: str, tmp_path: Path) -> None:
    _run(tmp_path, schedules=schedule)


def _run(folder: Path, **names: str) -> None:
    """A toy run of the components `names`, with a default for each other kind."""
    defaults = {"architectures": "bert", "objectives": "masked_lm", "optimizers": "adamw", "schedules": "linear"}
    try:
        training.run(defaults | names, folder)
    except training.IncompatibleComponents as reason:
        pytest.skip(str(reason))
