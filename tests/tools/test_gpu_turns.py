"""tools/gpu: contestants take turns in processes of their own, and the peer is given the rows of our run."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
from selection import at_night

GPU = Path(__file__).resolve().parents[2] / "tools" / "gpu"
sys.path[:0] = [str(GPU), str(GPU.with_name("bench"))]
import contestants  # noqa: E402
import ours  # noqa: E402
import processes  # noqa: E402
import settings as shared  # noqa: E402
import turns_at_device  # noqa: E402

from terakoya.training import trainer  # noqa: E402


@dataclass(frozen=True)
class Sleeper:
    """A run whose steps write down when they were taken."""

    file: Path
    window: int = 5
    broken_at: int = 1000
    last_words: str = "ValueError: no more"
    seconds: float = 0.001

    def train(self, clock: turns_at_device.Clock) -> None:
        for step in range(clock.steps + 10):
            if step == self.broken_at:
                os._exit(3) if not self.last_words else None
                raise ValueError("no more")
            with self.file.open("a") as lines:
                lines.write(f"{clock.ended >= clock.warm_up} {time.monotonic()}\n")
            time.sleep(self.seconds)
            clock.step_ended()

    def facts(self, clock: turns_at_device.Clock) -> dict[str, Any]:
        return {"tokens": clock.of_windows(list(range(clock.steps)))}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need no seconds for imports."""
    toy.start_fork_server()
    monkeypatch.setattr(processes, "START_METHOD", "forkserver")


@dataclass(frozen=True)
class Compiler(Sleeper):
    """A run whose child computes, as a compiler's does, in a session of its own."""

    late: bool = True

    def train(self, clock: turns_at_device.Clock) -> None:
        program = "import os, sys, time\nfile = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        program += "while True: os.pwrite(file, b'%020.6f' % time.monotonic(), 0)"
        child = subprocess.Popen([sys.executable, "-S", "-c", program, str(self.file)], start_new_session=True)
        self.file.with_suffix(".pid").write_text(str(child.pid))
        while self.late or not self.file.exists():
            time.sleep(0.01)
        clock.at_border()
        clock.at_border()


def timed(file: Path) -> list[float]:
    """When the steps were taken that count."""
    return [float(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("True")]


def test_windows_of_contestants_alternate_and_each_ends_with_its_last(tmp_path: Path, forked: None) -> None:
    files = [tmp_path / "one", tmp_path / "other"]
    sides = {file.name: Sleeper(file) for file in files}
    outcomes = dict(turns_at_device.take_turns(sides, apart=True, warm_seconds=60.0))
    assert list(outcomes) == ["one", "other"]
    for outcome in outcomes.values():
        assert len(outcome.seconds) == turns_at_device.WINDOWS and not outcome.error
        assert outcome.facts["tokens"] == [sum(range(2, 7)), sum(range(7, 12)), sum(range(12, 17))]
    one, other = (np.array(timed(file)).reshape(turns_at_device.WINDOWS, 5) for file in files)
    starts = np.sort(np.concatenate([one.min(1), other.min(1)]))
    assert starts.tolist() == np.stack([one.min(1), other.min(1)], 1).ravel().tolist()
    assert (one.max(1) < other.min(1)).all() and (other.max(1)[:-1] < one.min(1)[1:]).all()


def test_one_that_fails_ends_or_does_not_warm_up_leaves_the_others_alone(tmp_path: Path, forked: None) -> None:
    sides = {
        "fails": Sleeper(tmp_path / "fails", broken_at=4),
        "ends": Sleeper(tmp_path / "ends", broken_at=4, last_words=""),
        "good": Sleeper(tmp_path / "good"),
    }
    outcomes = dict(turns_at_device.take_turns(sides, apart=True, warm_seconds=60.0))
    assert outcomes["fails"].error == "ValueError: no more"
    assert outcomes["ends"].error == "its process ended without a word"
    assert len(outcomes["good"].seconds) == turns_at_device.WINDOWS
    (only,) = turns_at_device.take_turns({"late": Sleeper(tmp_path / "late")}, apart=True, warm_seconds=0.0)
    assert "warming up" in only[1].error


@pytest.mark.nightly
def test_a_run_that_is_late_ends_with_its_children_before_another_one_is_timed(tmp_path: Path, forked: None) -> None:
    dict(turns_at_device.take_turns({"first": Sleeper(tmp_path / "first")}, apart=True, warm_seconds=60.0))  # imports
    sides = {"late": Compiler(tmp_path / "late"), "good": Sleeper(tmp_path / "good")}
    outcomes = dict(turns_at_device.take_turns(sides, apart=True, warm_seconds=6.0))
    assert "warming up" in outcomes["late"].error and len(outcomes["good"].seconds) == turns_at_device.WINDOWS
    assert float((tmp_path / "late").read_text()) < min(timed(tmp_path / "good"))
    assert not processes.runs(int((tmp_path / "late.pid").read_text()))


@pytest.mark.nightly
def test_a_window_beside_which_a_child_of_another_run_computes_is_no_rate(tmp_path: Path, forked: None) -> None:
    sides = {"good": Sleeper(tmp_path / "good", seconds=0.2), "busy": Compiler(tmp_path / "busy", late=False)}
    try:
        outcomes = dict(turns_at_device.take_turns(sides, apart=True, warm_seconds=60.0))
    finally:
        os.kill(int((tmp_path / "busy.pid").read_text()), signal.SIGKILL)
    assert outcomes["good"].error.startswith("not timed: others computed for") and not outcomes["good"].seconds


def test_in_this_process_a_run_ends_with_its_last_window(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    outcome = turns_at_device.alone(Sleeper(file))
    assert len(outcome.seconds) == turns_at_device.WINDOWS and outcome.facts["tokens"]
    assert len(file.read_text().splitlines()) == 2 + 3 * 5
    assert turns_at_device.alone(Sleeper(file, broken_at=3)).error == "ValueError: no more"


@pytest.mark.parametrize("window", [3, 6, 20])
def test_our_side_says_how_often_the_gpu_waited_in_its_windows(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, side = turns_at_device.Clock(window), contestants.Ours({"precision": "bf16"}, tmp_path, window)
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(ours, "run", lambda raw, *_: given.append(raw))
    side.train(clock)
    # of a record the first step says nothing, and five others have to be known (training/step_clock.py)
    assert 7 <= given[0]["logging_steps"] <= clock.steps and given[0]["precision"] == "bf16"
    monkeypatch.setattr(ours, "clock_plugin", lambda: SimpleNamespace(tokens=[100] * clock.steps))
    world = {"compile": "whole", "cuda_graphs": True, "deterministic": True}
    records = [
        {"flops_per_token": 5.0, "world": world},
        {"step": 1},
        {"step": 7, "gpu_waits": 0.5},
        {"step": 14, "gpu_waits": 0.25},
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    facts = side.facts(clock)
    assert (facts["gpu_waits"], facts["tokens"]) == (0.25, [100 * window] * turns_at_device.WINDOWS)
    assert world.items() <= facts.items()


@pytest.mark.parametrize("preset", at_night(["bert_base", "electra_small", "gpt2_125m"], always=["electra_small"]))
def test_the_peer_is_given_the_rows_of_our_steps(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids under the same masks, with the same labels; as rows, and as the documents in them."""
    toy = shared.Settings(tmp_path, tmp_path, tiny=True, apart=False)
    raw = shared.Case(preset, rows=4, micro_steps=2).parameters(toy)
    seen: list[dict[str, np.ndarray]] = []
    taken: list[int] = []
    step = trainer.Trainer._step

    def watched(self: Any, batches: Any, *rest: Any) -> Any:
        seen.extend(batch.arrays for batch in batches.real)
        report = step(self, batches, *rest)
        taken.append(report.tokens)
        return report

    monkeypatch.setattr(trainer.Trainer, "_step", watched)
    ours.run(raw, 3, turns_at_device.Clock(window=10))
    rows = list(contestants.micro_batches(raw, 6, "rows"))
    documents = list(contestants.micro_batches(raw, 6, "documents"))
    for arrays, (row, _), (document, _) in zip(seen, rows, documents, strict=True):
        ids = torch.from_numpy(arrays["document_ids"])
        assert torch.equal(row["input_ids"], torch.from_numpy(arrays["input_ids"]))
        predicted = row["labels"] != contestants.IGNORED
        known = arrays["labels"] if "labels" in arrays else arrays["masked_labels"]
        assert row["labels"][predicted].tolist() == known[known != contestants.IGNORED].tolist()
        assert not predicted[ids < 0].any()
        present = document["attention_mask"] > 0
        for name in ("input_ids", "labels"):
            assert torch.equal(document[name][present], row[name][ids >= 0])
    counts = [count for _, count in rows]
    assert taken == [one + other for one, other in zip(counts[::2], counts[1::2], strict=True)]


@pytest.mark.parametrize("preset", at_night(["bert_base", "gpt2_125m"], always=["bert_base"]))
def test_on_documents_the_peer_computes_our_loss(preset: str, tmp_path: Path) -> None:
    from terakoya.config.parameters import Parameters
    from terakoya.store.token_store import TokenStore
    from terakoya.training.model.build import build_module

    toy = shared.Settings(tmp_path, tmp_path, tiny=True, apart=False)
    raw = {**shared.Case(preset, rows=4, micro_steps=1).parameters(toy), "precision": "fp32", "logging_steps": 1}
    raw["architecture"] |= {"hidden_dropout_prob": 0.0} if preset == "bert_base" else {}
    _, losses = ours.run(raw, 1, turns_at_device.Clock(window=10))
    opened = TokenStore.open(Path(raw["data"]["train"][0]))
    theirs = contestants.model(raw, torch.device("cpu")).eval()
    module: Any = build_module(Parameters.from_dict(raw, source="test"), opened.facts.vocabulary)
    theirs.load_state_dict(module.model.state_dict())
    ((inputs, _),) = contestants.micro_batches(raw, 1, "documents")
    with torch.no_grad():
        assert float(theirs(**inputs).loss) == pytest.approx(losses["loss 0"], rel=1e-5)
