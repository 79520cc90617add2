"""The peer of the showcase at toy size: `Trainer` trains it, Transformers loads it, and it is measured as ours is."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from terakoya_contract import toy

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture
def showcase(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    import showcase

    yield showcase


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    """A parameter file of a toy, beside its store."""
    store = toy.make_store(tmp_path)
    raw = {
        "data": {"train": [{"store": str(store.folder)}], "validation": [str(store.folder)], "sequence_length": 16},
        "architecture": {
            "type": "modernbert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 16, "local_attention": 4,
        },
        "objective": {"type": "masked_lm", "layout": "packed", "whole_word_mask": True},
        "optimizer": {"type": "muon", "learning_rate": 5e-3},
        "schedule": {"type": "linear", "warmup_steps": 2},
        "batch_size": {"-1": 4},
        "max_steps": 4,
        "precision": "fp32",
        "seed": 3,
    }  # fmt: skip
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


def test_the_peer_trains_the_same_architecture_and_is_measured_on_the_same_masks(
    showcase: ModuleType, tmp_path: Path, parameters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    peer = tmp_path / "peer"
    assert showcase.main(["train", str(parameters), "--seconds", "0.5", "--batch-size", "4", "--out", str(peer)]) == 0
    printed = re.findall(r"([\d,]+) (?:steps|tokens),", capsys.readouterr().out)
    steps, tokens = (int(number.replace(",", "")) for number in printed)
    assert tokens == steps * 4 * 16

    model, loading = AutoModelForMaskedLM.from_pretrained(peer, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.local_attention) == (32, 2, 4)
    with torch.no_grad():
        model.decoder.bias.zero_()
        model.decoder.weight.zero_()
    model.save_pretrained(tmp_path / "zeros")
    assert showcase.main(["measure", str(parameters), str(peer), str(tmp_path / "zeros"), "--batches", "3"]) == 0
    assert len(AutoTokenizer.from_pretrained(peer)) == toy.VOCABULARY.size
    losses = [float(each) for each in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    coin = torch.tensor(toy.VOCABULARY.size).log().item()
    assert len(losses) == 4 and losses[1::2] == [pytest.approx(coin, abs=1e-3)] * 2  # single tokens, whole words
    assert losses[0] < coin > losses[2]


def test_our_run_takes_the_steps_that_fit(
    showcase: ModuleType, tmp_path: Path, parameters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At two CPU seconds (a quarter of one on a GPU's clock) for a step, 9 seconds are 4 steps (36)."""
    tried: list[dict[str, Any]] = []

    def try_out(number: int, raw: dict[str, Any], *, steps: int, warm_up: int) -> SimpleNamespace:
        tried.append({"raw": raw, "steps": steps, "warm_up": warm_up})
        return SimpleNamespace(steps=[SimpleNamespace(tokens=64, wall=0.25, cpu=2.0)] * steps)

    commands: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(showcase.ours, "train", try_out)
    monkeypatch.setattr(showcase.subprocess, "run", run)
    for further in ([], ["--gpu"]):
        assert showcase.main(["ours", str(parameters), "--seconds", "9", "--out", str(tmp_path / "run"), *further]) == 7
    assert [command[-1] for command in commands] == ["max_steps=4", "max_steps=36"]
    assert [each["warm_up"] for each in tried] == [showcase.WARM_UP, showcase.GPU_WARM_UP]
    assert [each["steps"] for each in tried] == [showcase.SPEED_STEPS, showcase.GPU_SPEED_STEPS]
    assert not any("evaluation" in each["raw"] for each in tried)


def test_the_peer_goes_on_from_its_checkpoint(
    showcase: ModuleType, tmp_path: Path, parameters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "steps.json").write_text("6", encoding="utf-8")
    command = ["train", str(parameters), "--seconds", "1", "--batch-size", "4", "--save-steps", "2"]
    command += ["--checkpoints", str(folder), "--out", str(tmp_path / "peer")]
    step_ended = showcase.SpentClock.on_step_end
    steps = []

    def kill(clock: object, arguments: object, state: object, *rest: object, **named: object) -> None:
        step_ended(clock)
        steps.append(state.global_step)  # type: ignore[attr-defined]
        if steps == [1, 2, 3]:
            raise KeyboardInterrupt

    monkeypatch.setattr(showcase.SpentClock, "on_step_end", kill)
    with pytest.raises(KeyboardInterrupt):
        showcase.main(command)
    before = json.loads((folder / "cpu_seconds.json").read_text(encoding="utf-8"))
    assert showcase.main(command) == 0
    assert steps == [1, 2, 3, 3, 4, 5, 6]
    assert json.loads((folder / "cpu_seconds.json").read_text(encoding="utf-8")) > before > 0
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "peer").config.num_hidden_layers == 2
