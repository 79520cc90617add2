"""tools/plot_run.py: a resumed run is one curve, and the picture is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "plot_run.py"
pytest.importorskip("matplotlib")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """100 steps of 3,600 tokens a second, killed after step 80, resumed at 50."""

    def step(number: int) -> dict[str, Any]:
        values = {"loss": 8.0 - number / 50, "masked_accuracy": number / 1000, "tokens": 36_000 * number}
        return {"kind": "step", "step": number, "tokens_per_second": 3600.0, **values}

    records = [
        {"kind": "validation", "step": 0, "store": "work/val", "loss": 8.1, "masked_accuracy": 0.0},
        *map(step, range(10, 90, 10)),
        {"kind": "resume", "step": 50, "folder": "step-00000050", "world_size": 1},
        *map(step, range(60, 110, 10)),
        {"kind": "validation", "step": 100, "store": "work/val", "loss": 6.0, "masked_accuracy": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"kind": "st')
    return tmp_path


def test_steps_done_twice_count_once(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import plot_run

    curves = plot_run.read(run_folder)
    assert [point[0] for point in curves.points["loss"]] == list(range(10, 110, 10))
    assert [point[1] for point in curves.points["loss"]] == pytest.approx([step / 360 for step in range(10, 110, 10)])
    assert [(point[0], point[2]) for point in curves.points["validation val loss"]] == [(0, 8.1), (100, 6.0)]
    assert curves.restarts == [(50, pytest.approx(50 / 360))]


@pytest.mark.parametrize("against", ["steps", "hours"])
def test_a_picture_is_written(run_folder: Path, against: str, forks: None) -> None:
    out = run_folder / "pictures" / "run.png"
    command = [sys.executable, str(TOOL), str(run_folder), str(run_folder), "--labels", "a", "b", "--against", against]
    subprocess.run([*command, "--out", str(out)], check=True, timeout=120)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_other_numbers_are_drawn_where_they_are(run_folder: Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> None:
    """Each in a panel of its own: a name that ends like another's is not taken for it."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import plot_run

    line = {"kind": "step", "step": 110, "loss": 5.0, "generator_loss": 4.0, "discriminator_auc": 0.9}
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rpartition("\n")[0] + "\n" + json.dumps(line))
    numbers = ["loss", "generator_loss", "discriminator_auc"]
    figure = plot_run.draw([("a", plot_run.read(run_folder, numbers))], numbers)
    assert [len(axis.lines) - 1 for axis in figure.axes] == [2, 1, 1], "and one line for the restart"
    command = [sys.executable, str(TOOL), str(run_folder), "--out", str(run_folder / "x.png"), "--numbers", "los"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "metrics.jsonl has no los" in done.stderr


def test_no_run_is_said_in_a_sentence(tmp_path: Path, forks: None) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path), "--out", str(tmp_path / "x.png")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == f"{tmp_path / 'metrics.jsonl'}: no such file; expected the folder of a run, got an empty folder"
    )
