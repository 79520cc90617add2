"""Files and folders that appear whole or not at all; what a full or read-only disk and a killed process leave."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from terakoya.atomic_files import (
    check_new_folder,
    check_writable,
    lock_folder,
    new_folder,
    scratch_folder,
    wait_for_lock,
    write_atomically,
    write_text,
)
from terakoya.errors import UserError, describe_os_error
from terakoya.runs.files import read_lock
from terakoya.runs.folder import lock_run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_writing() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_new_folder_appears_when_its_block_has_succeeded(tmp_path: Path) -> None:
    out = tmp_path / "a/b/out"
    with new_folder(out) as draft:
        (draft / "inner").mkdir()
        (draft / "inner/file").write_text("1")
        (draft / "link").symlink_to("nowhere")
        assert not out.exists()
    assert names(out) == ["inner", "link"] and names(out.parent) == ["out"]
    with (
        pytest.raises(UserError, match="already exists and is not empty: expected a new or empty folder"),
        new_folder(out),
    ):
        pass
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as draft:
        (draft / "file").write_text("1")
    assert names(tmp_path / "empty") == ["file"]


def test_a_failure_leaves_nothing_and_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as full, new_folder(tmp_path / "out") as draft:
        (draft / "file").write_text("1")
        fail_writing()
    assert full.value.filename == str(tmp_path / "out")
    (tmp_path / "old").write_text("old")
    with pytest.raises(OSError, match="No space left") as full, write_atomically(tmp_path / "old") as out:
        out.write(b"new")
        fail_writing()
    assert full.value.filename == str(tmp_path / "old")
    assert names(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "old"


def test_what_killed_processes_left_is_removed_and_the_draft_of_a_running_one_stays(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = socket.gethostname()
    for number in (dead.pid, os.getppid()):
        (tmp_path / f".out.{host}.{number}.tmp/inner").mkdir(parents=True)
    (tmp_path / f".out.scratch.{host}.{dead.pid}.tmp/inner").mkdir(parents=True)
    with scratch_folder(tmp_path / "out") as scratch:
        assert not any(scratch.iterdir())
        assert names(tmp_path) == sorted(
            [scratch.name, *(f".out.{host}.{each}.tmp" for each in (dead.pid, os.getppid()))]
        )
    with new_folder(tmp_path / "out") as draft:
        (draft / "file").write_text("1")
    (tmp_path / f".page.{host}.{dead.pid}.tmp").write_text("half")
    write_text(tmp_path / "page", "whole")
    assert names(tmp_path) == [f".out.{host}.{os.getppid()}.tmp", "out", "page"]


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "日本")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text(encoding="utf-8") == "日本"
    code = "import sys, pathlib, terakoya.atomic_files as a; a.write_text(pathlib.Path('/dev/stdout'), 'page')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"page"


def test_a_place_that_cannot_be_written_to_is_found_before_anything_is_written(tmp_path: Path, read_only: Path) -> None:
    (tmp_path / "file").write_text("1")
    with pytest.raises(UserError, match="already exists and is a file"):
        check_new_folder(tmp_path / "file")
    for check in (check_new_folder, check_writable):
        with pytest.raises(UserError, match=f"but {tmp_path}/file is a file"):
            check(tmp_path / "file/out")
        with pytest.raises(UserError, match=f"{read_only} is read-only or another user's; choose another --out"):
            check(read_only / "a/b")
        check(tmp_path / "new/out")
    assert names(tmp_path) == ["file"]


def test_errors_of_libraries_in_rust_are_those_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as full, new_folder(tmp_path / "out"):
        raise Exception("No space left on device (os error 28)")
    assert full.value.filename == str(tmp_path / "out")
    with pytest.raises(ValueError, match="other"), new_folder(tmp_path / "out"):
        raise ValueError("other")


def test_a_folder_whose_name_cannot_be_flushed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fail_for_the_parent(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_the_parent)
    with pytest.raises(OSError, match="Input/output"), new_folder(tmp_path / "out") as draft:
        (draft / "file").write_text("1")
    assert names(tmp_path) == []


def _view_of(folder: Path) -> None:
    folder.joinpath("run.lock").touch()
    read_lock(folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize(
    "lock",
    [
        lambda folder: lock_folder(folder).__enter__(),
        lambda folder: wait_for_lock(folder).__enter__(),
        lambda folder: lock_run(folder / "run.lock"),
        _view_of,
        lambda folder: pytest.importorskip("terakoya_places.cached_store")._use(folder),
    ],
    ids=["prepare", "wait", "train", "status", "cache"],
)
def test_a_file_system_without_locks_is_named(
    lock: Callable[[Path], object], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other process is spoken of, as none is known."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) as caught:
        lock(tmp_path)
    message = describe_os_error(caught.value)
    assert "; mount this file system with locks (-o flock on Lustre" in message


def test_a_folder_that_another_process_has_locked_names_it(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from terakoya.atomic_files import lock_folder
with lock_folder(Path({str(tmp_path)!r})):
    print("locked", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=rf"but process {holder.pid} on host .* is preparing it"):
            lock_folder(tmp_path).__enter__()
        holder.kill()
