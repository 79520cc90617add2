"""Every registered component passes the checks of its kind, and the components work together.

`tests/core/contract` shows that each check fails for a broken component.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from terakoya import contract
from terakoya.contract import training
from terakoya.plugins import Registration, load

REGISTERED = load().components()


def _names(kind: str) -> list[str]:
    return [component.name for component in REGISTERED if component.kind == kind]


@pytest.mark.slow
@pytest.mark.parametrize("component", REGISTERED, ids=lambda component: f"{component.kind}-{component.name}")
def test_a_component_passes_the_checks_of_its_kind(component: Registration) -> None:
    results = list(contract.check_component(component, train=False))
    assert [str(result) for result in results if result.status not in ("passed", "skipped")] == []
    assert sum(result.status == "passed" for result in results) >= 6


AT_NIGHT = frozenset(
    {
        *(("instruction", name) for name in ("mistral", "olmo2", "gemma3_text", "modernbert_decoder")),
        *(("retromae", name) for name in ("bert", "electra", "roberta", "deberta", "deberta_v2", "eurobert")),
        *(("contrastive", name) for name in ("electra", "roberta", "deberta", "deberta_v2", "modernbert", "eurobert")),
    }
)
"""Pairs whose objective and whose architecture are in other pairs, too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "architecture"),
    [
        pytest.param(*pair, marks=[pytest.mark.nightly] * (pair in AT_NIGHT))
        for pair in itertools.product(_names("objectives"), _names("architectures"))
    ],
)
def test_it_learns_resumes_exports_and_loads(architecture: str, objective: str, tmp_path: Path) -> None:
    _run(tmp_path, architectures=architecture, objectives=objective)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", _names("optimizers"))
def test_an_optimizer_learns_and_resumes(optimizer: str, tmp_path: Path) -> None:
    _run(tmp_path, optimizers=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", _names("schedules"))
def test_a_schedule_learns_and_resumes(schedule: str, tmp_path: Path) -> None:
    _run(tmp_path, schedules=schedule)


def _run(folder: Path, **names: str) -> None:
    """A toy run of the components `names`, with a default for each other kind."""
    defaults = {"architectures": "bert", "objectives": "masked_lm", "optimizers": "adamw", "schedules": "linear"}
    try:
        training.run(defaults | names, folder)
    except training.IncompatibleComponents as reason:
        pytest.skip(str(reason))
