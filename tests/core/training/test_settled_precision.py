"""`"precision": "auto"` becomes one of a device at the start of a run, and stays it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.runs.checkpoints import read_manifest
from terakoya.training.resuming.before_torch import check_start
from terakoya.training.setup import train_in_this_process
from terakoya_planning.dry_run import dry_run
from terakoya_planning.estimate import estimate


def read(store: Path, **changes: Any) -> Parameters:
    return Parameters.from_dict(toy.parameters(store, precision="auto", **changes), source="test")


def pretend(monkeypatch: pytest.MonkeyPatch, *, fast: bool) -> None:
    """Makes this CPU one that multiplies bf16 fast, or does not."""
    monkeypatch.setattr("terakoya.toolkit.fast_products.multiplies_fast", lambda precision, device: fast)


@pytest.mark.parametrize(("fast", "other", "settled"), [(True, False, "bf16"), (False, True, "fp32")])
def test_a_run_takes_what_its_device_has_and_keeps_it_elsewhere(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool, other: bool, settled: str
) -> None:
    out = tmp_path / "run"

    def manifest(steps: int) -> Any:
        return read_manifest(out / "checkpoints" / f"step-{steps:08d}")

    pretend(monkeypatch, fast=fast)
    train_in_this_process(read(store, max_steps=2, checkpoint={"save_steps": 2}), out)
    assert manifest(2)["parameters"]["precision"] == settled
    assert Parameters.load(out / "parameters.json").precision == settled
    pretend(monkeypatch, fast=other)
    longer = read(store, max_steps=4, checkpoint={"save_steps": 2})
    check_start(out, longer, frozenset())
    assert dry_run(longer, out).parameters.precision == settled
    train_in_this_process(longer, out)
    assert manifest(4)["parameters"]["precision"] == settled
    assert dry_run(longer, tmp_path / "new").parameters.precision != settled, "another run takes the other"
    with pytest.raises(UserError, match="other values of precision"):
        check_start(out, longer.model_copy(update={"precision": "fp16"}), frozenset())
    (out / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    assert dry_run(longer, out).parameters.precision == settled, "a damaged one makes way for the one before"


def test_what_only_other_precisions_have_is_refused_where_the_device_settles_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, fast=False)
    flash = read(store, attention="flash")
    with pytest.raises(UserError, match='"precision": "auto" here: attention: flash needs precision "bf16" or "fp16"'):
        train_in_this_process(flash, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_estimate_is_of_the_precision_of_the_device(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card elsewhere has bf16, which saves activations that float32 keeps."""
    pretend(monkeypatch, fast=False)
    automatic, auto = toy.parameters(store, precision="auto"), {}
    for device in ("h100", "cpu"):
        auto[device] = estimate(automatic, device=device, processes=1).memory.peak
    own = [
        estimate({**automatic, "precision": each}, device="cpu", processes=1).memory.peak for each in ("bf16", "fp32")
    ]
    assert own[0] != own[1]
    assert auto["cpu"] == own[1]
    assert auto["h100"] == estimate({**automatic, "precision": "bf16"}, device="h100", processes=1).memory.peak
