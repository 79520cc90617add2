"""Tasks of lm-eval beside the measures of the core."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from terakoya import evaluate
from terakoya.errors import UserError


def test_tasks_are_passed_to_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signature of lm-eval 0.4."""
    (tmp_path / "config.json").write_text("{}")
    received: dict[str, Any] = {}

    def simple_evaluate(
        model: str, model_args: dict[str, Any], tasks: list[str], limit: int | None = None, device: str | None = None,
        log_samples: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        received.update(model=model, tasks=tasks, limit=limit, **model_args)
        if "nonsense" in tasks:
            raise KeyError("nonsense")
        return {"results": {"lambada": {"alias": "lambada", "acc,none": 0.25, "acc_stderr,none": 0.01}}}

    module = types.ModuleType("lm_eval")
    module.__spec__ = importlib.machinery.ModuleSpec("lm_eval", None)
    module.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", module)
    evaluation = evaluate(tmp_path, tasks=["lambada"], limit=7)
    assert evaluation.tasks == {"lambada": {"acc,none": 0.25, "acc_stderr,none": 0.01}} and evaluation.results == {}
    assert evaluation.settings == {"limit": 7, "precision": "fp32"}
    assert (
        received["model"] == "hf"
        and received["pretrained"] == str(tmp_path) == received["tokenizer"]
        and received["limit"] == 7
    )
    with pytest.raises(UserError, match="lm-eval refuses: 'nonsense'"):
        evaluate(tmp_path, tasks=["nonsense"])


def test_tasks_without_the_harness_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya_quality.evaluation.harness.importlib.util.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text("{}")  # no model: loading it would be another error
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r'^--tasks: .*pip install "terakoya\[evaluate\]"$'):
        evaluate(tmp_path, stores=[tmp_path / "store"], tasks=["lambada"])
    with pytest.raises(UserError, match='--tasks jglu: no such suite or task; did you mean "jglue"'):
        evaluate(tmp_path, stores=[tmp_path / "store"], tasks=["jglu"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": ["lambada"]}, 'pip install "terakoya[evaluate]"'),
        ({"tasks": ["lambada"], "stride": 2}, "--stride: is not for tasks of lm-eval"),
        ({"tuning": {"epochs": [2]}}, "--epochs: is for --tasks of a suite"),
        ({"tasks": ["lambada"], "tuning": {"epochs": [2]}}, "--epochs: is for --tasks of a suite"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(
    model: Path, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError) as raised:
        evaluate(model, **arguments)
    assert message in str(raised.value)
