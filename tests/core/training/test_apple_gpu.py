"""Machines with Apple's GPU: training runs on the CPU and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import toy

import terakoya
from terakoya_checks import diagnose


@pytest.fixture
def apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)


@pytest.mark.slow
def test_training_runs_on_the_cpu_and_says_so(
    apple_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = toy.make_store(tmp_path / "store", documents=20, seed=0)
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps(toy.parameters(store, max_steps=2)), encoding="utf-8")
    result = terakoya.train(str(file), str(tmp_path / "run"))
    said = capsys.readouterr().err
    assert result.step == 2 and "on cpu, ddp" in said and said.count("Apple's GPU (MPS) is not used: ") == 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (start,) = [each for each in map(json.loads, lines) if each["kind"] == "start"]
    assert "mps" not in json.dumps(start)


def test_no_word_of_it_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert [each.check for each in diagnose._check_torch()[1]] == ["products"]


def test_the_doctor_says_it(apple_gpu: None) -> None:
    (found,) = [each for each in diagnose._check_torch()[1] if each.check == "GPU"]
    assert found.status == "ok" and "Apple's GPU (MPS) is not used" in found.message
