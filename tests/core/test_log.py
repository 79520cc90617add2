"""Output in a pipe or a file: whole lines, without the spaces that fill up a table."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from terakoya import log
from terakoya_japanese.lines import wrap


@pytest.fixture(autouse=True)
def own_console() -> Iterator[None]:
    """Creates a console for this test's standard output."""
    log.console.cache_clear()
    yield
    log.console.cache_clear()


def sample() -> Table:
    table = Table("key", "value", box=None, header_style="bold", pad_edge=False)
    table.add_row("piece", "x" * 150)
    table.add_row("a row whose last cell is empty", "")
    table.add_row("two lines", "first  \nsecond")
    return table


def test_tables_in_a_pipe_have_no_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    log.console().print(sample())
    lines = capsys.readouterr().out.split("\n")
    assert [line.rstrip() for line in lines] == lines
    assert [line.split("  ")[0] for line in lines] == [
        "key",
        "piece",
        "a row whose last cell is empty",
        "two lines",
        "",
        "",
    ]
    assert lines[1].endswith("x" * 150) and lines[4].strip() == "second" and lines[4].startswith(" " * 30)


def test_text_keeps_its_own_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    log.console().print("a line that ends in a space ", markup=False, soft_wrap=True)
    assert capsys.readouterr().out == "a line that ends in a space \n"


def test_a_terminal_gets_unchanged_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    log.console().print(sample())
    assert max(map(len, capsys.readouterr().out.split("\n"))) <= 80


@pytest.mark.parametrize("arguments", [["plugins", "list"], ["plugins", "show", "bert"]])
def test_commands_print_no_trailing_spaces(arguments: list[str], forks: None) -> None:
    done = subprocess.run([sys.executable, "-m", "terakoya", *arguments], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) > 5
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_a_progress_bar_prints_nothing_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with log.progress_bar("work") as progress:
        progress(5, 10)
    assert capfd.readouterr() == ("", "")


def test_a_log_file_gets_small_sizes_in_kilobytes_and_the_time_left_at_the_rate_of_now(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 600.0, 610.0, 620.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    with log.progress_bar("work") as progress:
        progress(65_000, 144_000)
        progress(85_000, 144_000)
        progress(20_000_000, 2_000_000_000)
    assert capfd.readouterr().err.splitlines() == [
        "work: 65 KB / 144 KB (45%) done after 10 min",  # how fast this goes is not known yet
        "work: 85 KB / 144 KB (59%) done after 10 min, about 30 s left",
        "work: 20.0 MB / 2.00 GB (1%) done after 10 min, about 33 min left",
    ]


ESCAPES = "\x1b]0;pwned\x07\x1b[2J\x1b[1;31m\x9b31m\x7f\x00\b"


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(ESCAPES, box=None, pad_edge=False)
    table.add_row(Text(f"日本語 👨‍👩‍👧 {ESCAPES}"))
    log.console().print(table)
    log.console().print("a\tb" + ESCAPES, markup=False)
    out = capsys.readouterr().out
    assert not any(unicodedata.category(char) == "Cc" for char in out if char != "\n")
    assert out.count(r"\u001b]0;pwned") == 3 and "日本語 👨‍👩‍👧" in out
    assert out.endswith(r"a       b\u001b]0;pwned\u001b[2J\u001b[1;31m\u009b31m\u007f\u0000" + "\n")


def test_marks_that_turn_the_order_of_text_are_shown_as_escapes() -> None:
    assert log.visible("loss \u202e97.1\u2066 \u200f") == r"loss \u202e97.1\u2066 " + "\u200f"


def test_a_terminal_still_gets_colours(capsys: pytest.CaptureFixture[str]) -> None:
    console = log.new_console(force_terminal=True, color_system="standard", file=sys.stdout)
    console.print(Text(f"red {ESCAPES}", style="red"))
    assert re.sub(r"\x1b\[(31|0)m", "", capsys.readouterr().out).startswith(r"red \u001b]0;pwned\u001b[2J")


def test_everything_prints_through_these_consoles() -> None:
    sources = Path(log.__file__).parent.rglob("*.py")
    direct = [file for file in sources if re.search(r"(?<!def )\bConsole\(", file.read_text(encoding="utf-8"))]
    assert direct == []


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_gets_whole_words_and_whole_commands(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_wrap", wrap)
    terminal = log.new_console(force_terminal=True, width=width, color_system=None)
    prose = "    planned 16,029 rows of 128 tokens, as `terakoya store info work/store` says, " + "from documents " * 12
    as_it_is = [
        "next: terakoya prepare " + " ".join(f"corpus-{number}.jsonl.gz" for number in range(9)),
        '{"a": "' + "b c " * 60 + '"}',
    ]
    for text in (prose, *as_it_is):
        terminal.print(text, markup=False, soft_wrap=True)
    *lines, command, json = capsys.readouterr().out.rstrip("\n").split("\n")
    assert [command, json] == as_it_is
    assert " ".join(line.strip() for line in lines) == prose.strip()
    assert all(len(line) <= width and line.startswith("    ") for line in lines)
    assert any("`terakoya store info work/store`" in line for line in lines)


def test_an_error_begins_behind_its_label_and_hides_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_wrap", wrap)
    console = log.new_console(stderr=True, force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(log, "error_console", lambda: console)
    log.print_labelled("error:", "the token hf_" + "a" * 30 + " " + "is refused by the server " * 3, style="bold red")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: the token *** is refused") and max(map(len, lines)) <= 40 and len(lines) > 2


def test_a_terminal_without_japanese_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    log.configure()
    console = log.new_console()
    console.print("東")
    console.print(Text("京🙂"))
    sys.stdout.flush()
    assert written.getvalue() == rb"\u6771" + b"\n" + rb"\u4eac\U0001f642" + b"\n"
