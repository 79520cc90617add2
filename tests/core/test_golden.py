"""Token ids, bytes of stores, masks and losses are those of `tests/golden/numbers.json`: what all engines, or all
tokenizers, change alike is seen by no comparison of one with another."""

from __future__ import annotations

import json
from typing import Any

import pytest

import golden


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(golden.FILE.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def made(recorded: dict[str, Any]) -> dict[str, Any]:
    if golden.libraries() != recorded["libraries"]:
        pytest.skip(f"the numbers are those of {recorded['libraries']}")
    return golden.made_here()


@pytest.mark.parametrize("kind", golden.TOKENIZERS)
def test_ids_and_stores(kind: str, recorded: dict[str, Any], made: dict[str, Any]) -> None:
    assert made["tokenizers"][kind] == recorded["tokenizers"][kind]


@pytest.mark.parametrize("name", golden.FAMILIES)
def test_masks_losses_and_gradient_norms(name: str, recorded: dict[str, Any], made: dict[str, Any]) -> None:
    """Losses to what processors round otherwise."""
    mine, before = made["runs"][name], recorded["runs"][name]
    assert mine["batch"] == before["batch"]
    for processes in ("one", "two"):
        assert len(mine[processes]) == golden.STEPS
        for now, then in zip(mine[processes], before[processes], strict=True):
            assert now == pytest.approx(then, rel=1e-5)
