"""Every registered component keeps what its kind promises, whoever brings it; and components go together.

The promises themselves, and how each can be broken, are in `tests/core/contract`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from terakoya import contract
from terakoya.contract import training
from terakoya.plugins import Offer, load

OFFERS = load().components()


def _names(kind: str) -> list[str]:
    return [offer.name for offer in OFFERS if offer.kind == kind]


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.kind}-{offer.name}")
def test_a_component_keeps_what_its_kind_promises(offer: Offer) -> None:
    found = list(contract.check_component(offer, train=False))
    assert [str(finding) for finding in found if finding.verdict not in ("kept", "not looked at")] == []
    assert sum(finding.verdict == "kept" for finding in found) >= 6


@pytest.mark.parametrize("architecture", _names("architectures"))
@pytest.mark.parametrize("objective", _names("objectives"))
def test_it_learns_resumes_exports_and_loads(architecture: str, objective: str, tmp_path: Path) -> None:
    _run(tmp_path, architectures=architecture, objectives=objective)


@pytest.mark.parametrize("optimizer", _names("optimizers"))
def test_an_optimizer_learns_and_resumes(optimizer: str, tmp_path: Path) -> None:
    _run(tmp_path, optimizers=optimizer)


@pytest.mark.parametrize("schedule", _names("schedules"))
def test_a_schedule_learns_and_resumes(schedule: str, tmp_path: Path) -> None:
    _run(tmp_path, schedules=schedule)


def _run(folder: Path, **names: str) -> None:
    """A toy run of the components `names`, with usual ones for the other kinds."""
    usual = {"architectures": "bert", "objectives": "masked_lm", "optimizers": "adamw", "schedules": "linear"}
    try:
        training.run(usual | names, folder)
    except training.Unfit as reason:
        pytest.skip(str(reason))
