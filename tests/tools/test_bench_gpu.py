"""tools/bench/gpu.py runs: whole, at toy size, on a CPU; and its watch over waiting steps fits the trainer."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import toy

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


def test_our_side_trains_under_its_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    gpu = importlib.import_module("gpu")
    store = toy.make_store(tmp_path / "toy", documents=20, seed=1)
    turn = gpu.train_ours(0, toy.parameters(store), steps=2, warm_up=1)
    assert len(turn.steps) == 2
    assert turn.facts["gibibytes"] == 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["bert_base", "electra_small"])
def test_the_whole_script_runs_at_toy_size(model: str) -> None:
    command = [sys.executable, str(BENCH / "gpu.py"), "--tiny", "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "tokens/s" in line]
    assert len(rows) == 3
    assert rows[-1].startswith("terakoya, packed")
