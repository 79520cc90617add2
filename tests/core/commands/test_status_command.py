"""`terakoya status` as the user sees it."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from terakoya.commands.main import main
from terakoya.commands.status import table
from terakoya.runs.status import Checkpoint, RunStatus, Validation


def run_folder(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "parameters.json").write_text(json.dumps({"max_steps": 100}))
    now = time.time() - 300
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**each, "time": now}) + "\n" for each in records))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    one = {"kind": "step", "step": 40, "loss": 2.5, "tokens": 4000, "tokens_per_second": 1234.5, "mfu": 0.412}
    done = run_folder(tmp_path / "done", one, {"kind": "finished", "step": 100})
    odd = "a [red]name[/red]"
    failed = run_folder(tmp_path / odd, {**one, "loss": None}, {"kind": "error", "text": f"ValueError: {odd}"})
    return done, failed


def status_output(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        main(["status", *arguments])
    except SystemExit as left:
        assert not left.code, capsys.readouterr().err
    return capsys.readouterr().out


def test_one_run_is_printed_as_lines(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    lines = status_output(str(runs[0]), capsys=capsys).splitlines()
    facts = dict(line.split("  ", 1) for line in lines)
    assert facts["state"].strip() == "finished" and facts["step"].strip() == "100/100 (100.0%)"
    assert facts["rate"].strip() == "1,234 tokens/s  MFU 41.2%"
    assert facts["last record"].strip() == "5 min ago"


def test_bits_per_character_stand_beside_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = {"kind": "step", "step": 4, "loss": 3.0, "masked_bits_per_character": 2.125, "masked_bits_per_byte": 0.75}
    check = {**step, "kind": "validation", "store": "wiki", "masked_bits_per_character": 2.5}
    bits, other = run_folder(tmp_path / "bits", step, check), run_folder(tmp_path / "other", {**step, "loss": 2.0})
    facts = dict(line.split("  ", 1) for line in status_output(str(bits), capsys=capsys).splitlines())
    assert facts["bits/character"].strip() == "2.1250"
    header, *rows = status_output(str(bits), str(other), capsys=capsys).splitlines()
    assert "bits/character" in header and "2.5000" in rows[0] and "2.5000" not in rows[1]


def test_one_of_a_thing_is_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"kind": "step", "step": step, "loss": 3.0 - step / 10} for step in (1, 2, 3, 4)]
    warnings = [{"kind": "warning", "text": str(number)} for number in range(5)]
    few = status_output(str(run_folder(tmp_path / "few", *steps[:2], *warnings[:4])), capsys=capsys)
    assert ", -0.1000 in 1 step\n" in few and "and 1 earlier one, in metrics.jsonl" in few
    more = status_output(str(run_folder(tmp_path / "more", *steps, *warnings)), capsys=capsys)
    assert ", -0.2000 in 2 steps\n" in more and "and 2 earlier ones, in metrics.jsonl" in more


def test_escape_sequences_of_files_and_names_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;pwned\x07\x1b[2J\x9b31m\x7f"
    validation = {"kind": "validation", "step": 1, "store": hostile, "loss": 2.0}
    records = [{"kind": "step", "step": 1, "loss": 2.5}, validation, {"kind": "warning", "text": hostile}]
    runs = [run_folder(tmp_path / f"{hostile}{n}", *records, {"kind": "error", "text": hostile}) for n in (1, 2)]
    for arguments in ([str(runs[0])], list(map(str, runs)), [str(runs[0]), "--json"]):
        printed = status_output(*arguments, capsys=capsys)
        assert r"\u001b[2J\u009b31m\u007f" in printed
        assert [char for char in printed if char != "\n" and unicodedata.category(char) == "Cc"] == []


def test_several_runs_are_printed_as_a_table_with_their_problems(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = status_output(*map(str, runs), capsys=capsys).splitlines()
    assert printed[0].split()[:4] == ["run", "state", "step", "loss"]
    assert "finished  100/100 (100.0%)  2.5000" in printed[1]
    assert "failed" in printed[2] and str(runs[1]) in printed[2], "markup in a name is printed literally"
    assert printed[3] == f"{runs[1]}: failed: ValueError: a [red]name[/red]"


def test_json(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = json.loads(status_output(*map(str, runs), "--json", capsys=capsys))
    assert (first["folder"], first["state"], first["step"], first["loss"]) == (str(runs[0]), "finished", 100, 2.5)
    assert second["state"] == "failed" and second["loss"] is None and "loss" not in second["values"]


def test_watch_prints_again_until_it_is_stopped(runs: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "terakoya", "status", str(runs[0]), "--watch", "--every", "0.2"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    seen = 0
    for line in watching.stdout:
        seen += line.startswith("state ")
        if seen == 3:
            break
    watching.send_signal(signal.SIGINT)
    _, error = watching.communicate(timeout=30)
    assert seen == 3 and watching.returncode == 0 and not error


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (60, "run state step loss"),
        (80, "run state step loss remaining"),
        (120, "run state step loss tokens/s remaining validation checkpoint"),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_whole_words(width: int, columns: str) -> None:
    """Four runs in the middle of a long training, and one whose state is a long word."""
    runs = [
        RunStatus(
            Path(f"work/experiments/{name}"), "training", "training", step=123_456, max_steps=1_000_000,
            share_done=0.123456, loss=26.6231, loss_change=-0.2012, values={"tokens_per_second": 123_456.0},
            seconds_left=100_000.0, validations=(Validation("wiki", 5, {"loss": 2.5}),),
            checkpoint=Checkpoint("step-00123000", 123_000, 500.0, 3), restarts=2,
        )
        for name in ("electra", "bert", "modernbert")
    ] + [RunStatus(Path("work/experiments/gpt2"), "not started", "not started")]  # fmt: skip
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(table(runs, width=width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in lines) <= width and "…" not in "".join(lines) and len(lines) == 5
    assert lines[0].replace("validation loss", "validation").split() == columns.split()
    assert [line.split()[0].rpartition("/")[2] for line in lines[1:]] == ["electra", "bert", "modernbert", "gpt2"]
    assert "123,456/1,000,000 (12.3%)" in lines[1] and "not started" in lines[4]
