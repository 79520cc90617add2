"""Where a command is to write is looked at before anything is loaded; errors of the system are told without a
traceback."""

import errno
import os
from pathlib import Path

import pytest
from command_line import refusal

from terakoya.atomic_files import check_writable
from terakoya.commands.main import main
from terakoya.errors import FileError, UserError, describe_os_error

WRITERS = {
    "train": ["train", "nothing.json"],
    "prepare": ["prepare", "nothing.txt", "--tokenizer", "nothing"],
    "tokenizer train": ["tokenizer", "train", "nothing.txt", "--type", "byte_bpe"],
    "tokenizer count": ["tokenizer", "count", "nothing.txt", "--type", "byte_bpe"],
    "export": ["export", "nothing"],
    "import": ["import", "deepspeed", "nothing"],
    "report": ["report", "nothing"],
    "store merge": ["store", "merge", "nothing", "nothing"],
}
"""Commands whose inputs are not there: whatever they complain of instead is looked at first."""


@pytest.mark.parametrize("verb", WRITERS)
def test_a_read_only_place_is_found_first(verb: str, read_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, *WRITERS[verb], "--out", str(read_only / "out"))
    assert f"{read_only} is read-only or another user's; choose another --out" in error


@pytest.mark.parametrize("verb", ["train", "prepare", "export", "tokenizer train", "store merge"])
def test_a_file_in_place_of_the_folder_is_found_first(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("mine")
    assert f"{tmp_path}/out" in (error := refusal(capsys, *WRITERS[verb], "--out", str(tmp_path / "out")))
    assert "is a file" in error and (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("verb", ["train", "export", "prepare"])
def test_a_place_that_takes_no_files_and_impossible_names_are_found_first(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, *WRITERS[verb], "--out", "/proc/out")
    assert (
        "/proc takes no files (No such file or directory); choose another --out" in error or "/proc is read-" in error
    )
    error = refusal(capsys, *WRITERS[verb], "--out", str(tmp_path / ("a" * 300)))
    assert error.endswith("aaa: File name too long; choose a shorter name\n")


def test_a_path_with_a_nul_character_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\\x00b': expected a path without a NUL character; choose another --out"):
        check_writable(tmp_path / "a\0b")
    with pytest.raises(UserError, match=r"\\udc82': expected a path in UTF-8, which libraries ask for; choose"):
        check_writable(tmp_path / os.fsdecode(b"\x82"))


def test_a_command_that_finds_no_space_says_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "out"))

    monkeypatch.setattr("terakoya.commands.main.command_line", lambda *_: no_space)
    error = refusal(capsys, "export")
    assert error == f"error: {tmp_path}/out: No space left on device; free some space and give the same command again\n"
    monkeypatch.setenv("TERAKOYA_DEBUG", "1")
    with pytest.raises(OSError, match="No space"):
        main(["export"])


def test_advice_fits_the_error() -> None:
    assert (
        describe_os_error(OSError(errno.EROFS, "Read-only", "a"))
        == "a: Read-only; choose a place that you may write to"
    )
    assert describe_os_error(OSError(errno.ENOENT, "Not there", "a")) == "a: Not there"
    assert describe_os_error(OSError(errno.EIO, "I/O error")).startswith("I/O error; check the disk or file server and")
    assert isinstance(FileError("saving failed", errno.EDQUOT), UserError)
    assert str(FileError("saving failed", errno.EDQUOT)).endswith(
        "failed; free some space and give the same command again"
    )
