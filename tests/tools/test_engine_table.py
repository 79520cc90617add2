"""tools/engines/table.py: what each engine trains is one process's, and the table says so where it is not."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import toy

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "engines" / "table.py"
DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def run(*arguments: str, out: Path) -> str:
    """What the command writes; fails where it does."""
    command = [sys.executable, str(TOOL), *arguments, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out.read_text(encoding="utf-8")


@pytest.mark.nightly
@DEEPSPEED
def test_an_engine_of_each_kind_trains_what_one_process_does(
    tmp_path: Path, tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "table.md"
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--quick", "--out", str(out)])
    engines = ("ZeRO-2", "fsdp", "tp 2")  # the night tries all, with every architecture
    monkeypatch.setattr(tool.cases, "QUICK", {engine: tool.cases.QUICK[engine] for engine in engines})
    toy.start_fork_server()  # the command's processes come from it
    assert tool.main() == 0
    text = out.read_text(encoding="utf-8")
    gradients, exports = text.split("## ")[1:]
    for part in (gradients, exports):
        for engine, architecture in tool.cases.QUICK.items():
            text = cell(part, engine, architecture)
            assert text == "same bits" or 0 < float(text) < 1e-5, (engine, architecture, text)


@pytest.mark.nightly
@DEEPSPEED
def test_every_engine_with_every_architecture(tmp_path: Path) -> None:
    text = run(out=tmp_path / "table.md")
    assert "failed" not in text and "**" not in text


def test_the_table_in_the_documentation_names_every_case(tool: ModuleType) -> None:
    text = (ROOT / "core" / "ENGINES.md").read_text(encoding="utf-8")
    assert "failed" not in text and "**" not in text
    for title in tool.CHECKS.values():
        part = text.split(f"## {title}")[1].split("## ")[0]
        for engine in tool.cases.ENGINES:
            assert all(cell(part, engine, name) for name in tool.cases.ARCHITECTURES), (title, engine)
    assert "\n".join(tool.Table.read(text).lines()) in text, "what is read is what was written"


def cell(part: str, engine: str, architecture: str) -> str:
    """The text of a cell of the table in `part`."""
    rows = [[each.strip() for each in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("|")]
    (row,) = (row for row in rows if row[0] == engine)
    return row[rows[0].index(architecture)]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command as a module."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)  # what the command sets where nobody has; taken back afterwards
    return importlib.import_module("table")


def test_an_error_above_its_limit_is_shown_and_fails(tool: ModuleType) -> None:
    table = tool.Table()
    table.error("gradients", "ddp", "bert", 9e-7)
    table.error("gradients", "tp 2", "bert", 9e-6)
    table.error("killed", "ddp", "bert", 0.0)
    assert not table.bad
    table.error("gradients", "fsdp", "bert", 9e-6)
    table.error("another", "ddp", "bert", float("nan"))
    table.error("killed", "fsdp", "bert", 1e-12)
    table.reason("export", "fsdp", "bert", "failed", "exit codes [1, 1]: why")
    table.reason("export", "ddp", "bert", "refused", "because")
    assert len(table.bad) == 4
    text = "\n".join(table.lines())
    shown = (
        "| ddp | 9e-07 |", "| fsdp | **9e-06** |", "| tp 2 | 9e-06 |", "| ddp | same bits |", "**1e-12**",
        "| ddp | refused [1] |", "| fsdp | failed [2] |", "1. because", "2. exit codes [1, 1]: why",
    )  # fmt: skip
    for each in shown:
        assert each in text, each


def test_cells_that_are_run_replace_those_of_a_file(
    tmp_path: Path, tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others stay, with their footnotes; footnotes that no cell has any longer go."""
    table = tool.Table()
    for check in tool.CHECKS:
        table.reason(check, "ddp", "bert", "refused", "because, once")
        table.reason(check, "fsdp", "gpt2", "refused", "it is so")
    table.error("gradients", "ddp", "gpt2", 4e-8)
    table.error("another", "fsdp", "bert", 3e-9, " (tp 2)")
    file = tmp_path / "table.md"
    file.write_text("\n".join(["# Engines", "", "Old.", "", *table.lines()]) + "\n", encoding="utf-8")
    before = file.read_text(encoding="utf-8")

    def case(harness: object, engine: str, architecture: str, *, quick: bool) -> None:
        (new,) = (value for value in vars(harness).values() if isinstance(value, tool.Table))
        new.error("gradients", engine, architecture, 2e-8)
        for check in list(tool.CHECKS)[1:]:
            new.error(check, engine, architecture, 0.0)

    monkeypatch.setattr(tool.Harness, "case", case)
    monkeypatch.setattr(tool.toy, "make_store", lambda folder: SimpleNamespace(folder=folder))
    arguments = ["--into", str(file), "--engine", "ddp", "--architecture", "bert"]
    monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments])
    assert tool.main() == 0
    after = file.read_text(encoding="utf-8")
    assert "| ddp | refused [1] | 4e-08 |" in before and "| ddp | 2e-08 | 4e-08 |" in after
    assert "| fsdp |  | refused [2] |" in before and "| fsdp |  | refused [1] |" in after
    assert "| fsdp | 3e-09 (tp 2) | refused [1] |" in after
    assert "because, once" not in after and after.endswith("\n1. it is so\n") and "Old." not in after


def test_weights_of_other_names_or_shapes_are_no_match(tool: ModuleType) -> None:
    weights = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}
    error = tool.measures.relative_error
    assert error(weights, weights) == 0.0
    assert error({"a": torch.tensor([3.0, 1.0]), "b": weights["b"]}, weights) == pytest.approx(0.2)
    assert error({"a": weights["a"]}, weights) == float("inf")
    assert error({"a": weights["a"], "b": torch.zeros(2, 1)}, weights) == float("inf")
