"""What a run shows on terminals of 60, 80 and 120 columns: aligned, and nothing cut inside a word."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from terakoya import log
from terakoya.training import run_log as run_log_module
from terakoya.training.run_log import RunLog
from terakoya.training.screen import StepTable, StepView, progress_bar, step_cells, validation_lines

WIDTHS = (60, 80, 120)
VALUES = {
    "loss": 31.3728, "generator_loss": 6.1728, "discriminator_loss": 0.504, "accuracy": 0.31, "grad_norm": 12.345,
    "learning_rate": 9.7e-5, "tokens_per_second": 1_234_567.0, "samples_per_second": 2410.0, "tflops": 312.3,
    "mfu": 0.412,
}  # fmt: skip
STORES = {
    "work/stores.val/wikipedia_ja": {
        "loss": 7.6595,
        "mlm_loss": 7.6595,
        "masked_accuracy": 0.0226,
        "perplexity": 2120.7,
    },
    "work/stores.val/青空文庫": {"loss": 8.1, "mlm_loss": 8.1, "masked_accuracy": 0.0101, "perplexity": 3294.5},
    "a/folder/with/a/rather/long/path/manual": {
        "loss": 6.0,
        "mlm_loss": 6.0,
        "masked_accuracy": 0.1,
        "perplexity": 403.4,
    },
}


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_aligned_and_drop_columns_not_letters(width: int) -> None:
    table, lines = StepTable(), []
    for number in range(1, 45):
        header, row = table.lines(step_cells(VALUES, step=f"{number * 100:,}"), width)
        assert (header is not None) == (number in (1, 10, 30)), "at first, where a column gets wider, every 20 rows"
        lines += [header, row] if header else [row]
    assert max(map(cell_len, lines)) <= width
    header = lines[0].split("  ")
    words = {each.strip() for each in header if each.strip()}
    all_words = {
        "step", "loss", "generator", "discriminator", "learning rate", "gradient norm", "tokens/s", "tflops", "mfu",
    }  # fmt: skip
    assert {"step", "loss", "learning rate"} <= words <= all_words
    assert (words == all_words) == (width == 120)
    assert len({cell_len(line) for line in lines[-10:]}) == 1, "right-aligned: rows of one length"


@pytest.mark.parametrize("name", ["bits_per_character", "masked_bits_per_character"])
def test_bits_per_character_are_a_column_where_they_are_known(name: str) -> None:
    cells = step_cells({**VALUES, name: 3.21987, name.replace("character", "byte"): 1.1}, step="1")
    assert cells["bits/character"] == "3.2199" and "bits/character" not in step_cells(VALUES, step="1")
    assert list(cells).index("bits/character") == list(cells).index("learning rate") - 1
    assert not any("1.1" in text for text in cells.values()), "bytes are in metrics.jsonl"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bar_keeps_what_matters_and_whole_words(width: int) -> None:
    parts = ("12,345/1,000,000", "117:05:12 left", "next save at 15,000", "slowest gpu-node-17 rank 3 +21%")
    line = progress_bar(0.0123, parts, width)
    assert cell_len(line) <= width and line.startswith("  1%  ")
    shown = [part for part in parts if part in line]
    assert list(parts[: len(shown)]) == shown and shown[:2] == list(parts[:2])
    assert line.split("  ")[-1].strip() == shown[-1], "nothing but whole parts"
    assert progress_bar(1.0, parts, width).count("━") > progress_bar(0.5, parts, width).count("━") > 0


@pytest.mark.parametrize("width", WIDTHS)
def test_each_validation_store_has_one_line(width: int) -> None:
    lines = validation_lines(12_000, STORES, width)
    assert len(lines) == 3 and max(map(cell_len, lines)) <= width
    for line, name, values in zip(lines, ("wikipedia_ja", "青空文庫", "manual"), STORES.values(), strict=True):
        assert line.startswith("step 12,000  validation  ") and name in line
        assert f"loss {values['loss']:.4f}" in line and "mlm_loss" not in line
        assert all(part.strip() in line for part in line.split("  ")) and not line.endswith("…")
    starts = {cell_len(line[: line.index("  loss ")]) for line in lines}
    assert len(starts) == 1, "the numbers are below each other, also after wide characters"
    assert ("perplexity 403.4000" in lines[2]) == (width == 120)


def test_two_stores_of_one_name_keep_their_folders() -> None:
    lines = validation_lines(1, {"work/a/wiki": {"loss": 1.0}, "work/b/wiki": {"loss": 2.0}}, 60)
    assert "a/wiki" in lines[0] and "b/wiki" in lines[1] and "work" not in lines[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", WIDTHS)
def test_the_scrollback_of_a_terminal(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, validations, messages and warnings stay; the bar is always the last line, and gone at the end."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(run_log_module, "ROW_SECONDS", 0.0)
    monkeypatch.setattr(run_log_module, "BAR_SECONDS", 0.0)
    shown = RunLog(tmp_path, [], {}, active=True)
    shown.console = Console(file=screen, width=width, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(log, "error_console", lambda: shown.console)
    for step in (10, 20, 30):
        shown.show_step(StepView(step_cells(VALUES, step=str(step)), step / 30, (f"{step}/30", "0:00:10 left"), "x"))
        if step == 20:
            shown.show_validation(step, STORES)
            shown.print("a message of many words that has to be broken somewhere, but never inside one of its words")
            handler = log.ConsoleHandler()
            handler.emit(logging.LogRecord("terakoya", logging.WARNING, "", 0, "a warning", (), None))
    assert screen.getvalue().endswith("\r\x1b[K" + progress_bar(1.0, ("30/30", "0:00:10 left"), width - 1))
    shown.close()
    lines = [line.rpartition("\r\x1b[K")[2] for line in screen.getvalue().split("\n")]
    assert lines[-1] == "" and max(map(cell_len, lines)) <= width
    assert [line.split()[0] for line in lines if line.strip()[:2] in ("10", "20", "30")] == ["10", "20", "30"]
    assert sum("validation" in line for line in lines) == 3 and "warning: a warning" in lines
    message = " ".join(lines[lines.index(next(line for line in lines if line.startswith("a message"))) :][:2])
    assert "broken somewhere, but never inside one" in message


def test_outside_a_terminal_lines_are_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = RunLog(tmp_path, [], {}, active=True)
    view = StepView({"step": "1"}, 0.5, ("1/2",), "step 1/2  loss 3.0000")
    shown.show_step(view)
    shown.show_step(view)
    shown.show_validation(1, {"work/wiki": {"loss": 2.0}})
    shown.close()
    assert capsys.readouterr().err == "step 1/2  loss 3.0000\nstep 1  validation on work/wiki: loss 2.0000\n"


def test_a_progress_outside_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.error_console.cache_clear()
    times = iter([0.0, 1.0, 11.0, 12.0, 21.5])
    monkeypatch.setattr(log.time, "monotonic", lambda: next(times))
    with log.progress_bar("prepare") as update:
        for done in (1, 2, 3, 4):
            update(done * 10**9, 8 * 10**9)
    log.error_console.cache_clear()
    assert capsys.readouterr().err.splitlines() == [
        "prepare: 2.00 GB / 8.00 GB (25%) done after 11 s, about 60 s left",
        "prepare: 4.00 GB / 8.00 GB (50%) done after 22 s, about 27 s left",
    ], "at the rate since the first report: 1 GB in 10 s, 3 GB in 20.5 s"
