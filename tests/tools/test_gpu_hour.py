"""tools/gpu/hour.py runs at toy size on a CPU: every stage, each measurement kept at once, a stage that hangs ended."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SLOW_STAGES = {"command", "facts", "graphs"}
"""They start processes: `test_a_part_runs_as_a_command` does."""
SAMPLE = {
    ("A", "parity"),
    ("A", "waits"),
    ("A", "boundaries"),
    ("A", "memory"),
    ("A", "fused"),
    ("B", "electra_small"),
    ("B", "trainer"),
}


@pytest.fixture
def hour(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for folder in ("gpu", "bench"):
        monkeypatch.syspath_prepend(str(TOOLS / folder))
    yield importlib.import_module("hour")


def stages() -> list[Any]:
    """The stages as parameters; what is not in the sample runs at night."""
    names = {
        "A": ("parity", "waits", "boundaries", "fp16", "memory", "fused"),
        "B": ("bert_base", "trainer", "electra_small", "bert_large", "electra_base", "modernbert_base", "graphs"),
        "C": ("gpt2_125m", "llama_1b", "llama_8b, 4 layers", "llama_8b, 8 layers"),
    }
    return [
        pytest.param(part, name, marks=() if (part, name) in SAMPLE else (pytest.mark.nightly,))
        for part, each in names.items()
        for name in each
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "name"), stages())
def test_a_stage_runs_at_toy_size(
    part: str, name: str, hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the stage of the fused kernels sets it, for its own process
    out = tmp_path / "results" / "toy"
    out.mkdir(parents=True)
    hour.run_stage(part, name, hour.Settings(out, tmp_path / "work", True))
    found = [json.loads(line) for line in (out / "hour.jsonl").read_text().splitlines()]
    page = importlib.import_module("measured").section(out.parent, "en")
    assert page.count(f"\n| {part} | {name} | ") == len(found)  # each has a line in docs/explanation/measured.md
    assert found and not any(each.get("error") for each in found)
    assert all(each["stage"] == name and each["torch"] and each["device"] == "cpu" for each in found)
    if name == "parity":  # the device is the CPU itself
        exact = [each for each in found if each["precision"] == "fp32"]
        assert len(exact) == 6 and all(each["gradient_error"] == 0.0 and each["same_bits_twice"] for each in exact)
    if name == "fused":
        blocks = [each for each in found if each["what"] == "block"]
        assert [each["variant"] for each in blocks] == ["plain", *["fused"] * found[0]["right"]]
        assert all(each["gradient_error"] < 0.02 and each["same_bits_twice"] for each in blocks)
    if part == "B":
        assert all(each["tokens_per_second"] > 0 for each in found if "tokens_per_second" in each)


def test_the_parameters_above_are_all_stages(hour: ModuleType) -> None:
    named = {(each.values[0], each.values[1]) for each in stages()}
    assert named | {("A", name) for name in SLOW_STAGES} == {
        (part, name) for part, each in hour.parts().items() for name in each
    }


@pytest.mark.nightly
def test_a_part_runs_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "gpu" / "hour.py"), "--part", "A", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--minutes", "15"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("resumed" in line and "same_bits True" in line for line in done.stdout.splitlines())
    cut = subprocess.run([*command, "--minutes", "0"], capture_output=True, text=True, check=False)
    assert cut.returncode == 1 and "facts (no time left)" in cut.stderr


def test_without_a_gpu_it_says_so(hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hour.py", "--part", "A", "--out", str(tmp_path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert hour.main() == 2
