"""Files and folders that appear under their names completely or not at all, also after a power cut; records that carry
their own hash; locks.

See docs/design/files.md.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict

from terakoya.errors import UserError
from terakoya.places import check_local
from terakoya.process_pool import is_alive


class FileFacts(BaseModel):
    """The size in bytes and the SHA-256 of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    sha256: str

    @classmethod
    def of(cls, file: Path, *, sync: bool = False) -> Self:
        """Reads `file`; with `sync`, it is flushed to disk first."""
        with file.open("rb") as stream:
            if sync:
                os.fsync(stream.fileno())
            return cls(sha256=hashlib.file_digest(stream, "sha256").hexdigest(), size=stream.tell())


class HashedFile:
    """A file that is being written, with its size and hash so far."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | np.ndarray) -> None:
        """Appends `data`."""
        view = as_bytes(data)
        self._stream.write(view)
        self._hash.update(view)
        self._size += view.nbytes

    def flush(self) -> None:
        """Passes everything that was appended on to the system."""
        self._stream.flush()

    def facts(self) -> FileFacts:
        """Returns the size and hash of the written data."""
        return FileFacts(size=self._size, sha256=self._hash.hexdigest())


@contextmanager
def write_atomically(file: Path, *, draft_folder: Path | None = None) -> Iterator[HashedFile]:
    """Writes `file` completely or not at all. The data is written under another name, which contains host and process,
    in `draft_folder` (by default the folder of `file`), flushed to disk, then renamed. Raises OSError if the file
    cannot be written; it names the file, and what was there before is still there."""
    draft = (draft_folder or file.parent) / _draft_name(file)
    try:
        with _naming(file):
            with draft.open("wb") as stream:
                yield HashedFile(stream)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(file)
            flush(file.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_text(file: Path, text: str) -> None:
    """Writes `file` as `write_atomically` does. A link stays a link, and a pipe or device (/dev/stdout) what it is."""
    if file.exists() and not file.is_file():
        with _naming(file):
            file.write_text(text, encoding="utf-8")
        return
    file = file.resolve()
    _remove_drafts_of_dead_processes(file)
    with write_atomically(file) as stream:
        stream.write(text.encode())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to write into. It becomes the folder `out` if the block succeeds, else it is removed.

    Raises:
        UserError: as `check_new_folder` does.
        OSError: a file cannot be written; there is no `out` then.
    """
    check_new_folder(out)
    _remove_drafts_of_dead_processes(out)
    draft = out.with_name(_draft_name(out))
    try:
        with _naming(out):
            draft.mkdir(parents=True)
            yield draft
            commit_folder(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


@contextmanager
def scratch_folder(near: Path) -> Iterator[Path]:
    """Yields a new folder next to `near`, for what nobody needs after the block; the next one removes what a killed
    process of this host left. Raises OSError where nothing can be written there."""
    name = near.absolute().with_name(f"{near.absolute().name}.scratch")
    _remove_drafts_of_dead_processes(name)
    draft = name.with_name(_draft_name(name))
    try:
        draft.mkdir(parents=True)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def commit_folder(draft: Path, final: Path, *, flushed: Collection[Path] = ()) -> None:
    """Renames the folder `draft` to `final`, which may be an empty folder, with all that is in it flushed to disk
    before and its name after. Files at its top are flushed last, those that are `flushed` already not again. Raises
    OSError if something could not be written, flushed or renamed; there is no `final` then."""
    for folder, _, names in os.walk(draft, topdown=False):
        for path in (*(Path(folder, name) for name in names), Path(folder)):
            if not path.is_symlink() and path not in flushed:
                flush(path)
    if final.is_dir():
        final.rmdir()
    draft.rename(final)
    try:
        flush(final.parent)
    except OSError:
        with suppress(OSError):
            final.rename(draft)
        raise


def check_new_folder(out: Path) -> None:
    """Raises UserError unless `out` is a new or empty folder in a place that can be written to."""
    check_local(out, "a new folder")
    if not out.name:
        raise UserError(f"{out}: expected a new folder, got one without a name of its own; name it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        found = "is not empty" if out.is_dir() else "is a file"
        raise UserError(
            f"{out}: already exists and {found}: expected a new or empty folder; choose another, or remove this one"
        )
    check_writable(out.parent)


def check_writable(folder: Path) -> None:
    """Raises UserError if nothing can be written into `folder`, or if it does not exist and cannot be made."""
    if "\0" in str(folder):
        raise UserError(f"{str(folder)!r}: expected a path without a NUL character; choose another --out")
    if any("\ud800" <= character <= "\udfff" for character in str(folder)):  # how Python keeps such bytes
        raise UserError(f"{str(folder)!r}: expected a path in UTF-8, which libraries ask for; choose another --out")
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise UserError(f"{folder}: expected a folder, but {place} is a file; choose another --out")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(
            f"{folder}: expected a folder that can be written to, but {place} is read-only or another user's; choose "
            "another --out"
        )
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:  # such as /proc, where the rights say nothing; a full disk is told where it matters
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise UserError(
                f"{folder}: expected a folder that can be written to, but {place} takes no files ({error.strerror}); "
                "choose another --out"
            ) from None


def copy_folder(source: Path, target: Path) -> None:
    """Copies the files of the folder `source`, and of the folders in it, into `target`; raises OSError where one cannot
    be copied, which `shutil.copytree` collects into an error of its own."""
    for folder, _, names in os.walk(source):
        copied = target / Path(folder).relative_to(source)
        copied.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(Path(folder, name), copied / name)


def flush(path: Path) -> None:
    """Flushes the file `path`, or the names in the folder `path`, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that flushes no folders, such as s3fs
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError that names no file, as those of writing and flushing do not, and raises the errors of
    libraries in Rust as the OSErrors that they are about."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except Exception as error:
        if (translated := os_error_of(error, path)) is not None:
            raise translated from error
        raise


def os_error_of(error: Exception, path: Path) -> OSError | None:
    """Returns the OSError at `path` that an error of a library in Rust is about, None if it is about something else."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return None if number is None else OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def _draft_name(final: Path) -> str:
    return f".{final.name}.{socket.gethostname()}.{os.getpid()}.tmp"


def _remove_drafts_of_dead_processes(out: Path) -> None:
    """Removes what processes of this host that were killed have left of a new file or folder `out`."""
    host = socket.gethostname()
    for draft in out.parent.glob(f".{glob.escape(f'{out.name}.{host}')}.*.tmp"):
        process = draft.name.removesuffix(".tmp").rpartition(".")[2]
        if process.isdigit() and (int(process) == os.getpid() or not is_alive(int(process))):
            if draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                draft.unlink(missing_ok=True)


def as_bytes(data: bytes | np.ndarray) -> memoryview:
    """Returns the bytes of `data`, which are not copied."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def dump_hashed_json(record: Mapping[str, Any]) -> bytes:
    """Returns `record` as JSON, with the SHA-256 of its content under the key "sha256"."""
    return orjson.dumps({**record, "sha256": _digest(record)}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def load_hashed_json(content: bytes) -> dict[str, Any]:
    """Returns the record that is in `content`. Raises ValueError if it is not the one that `dump_hashed_json` wrote."""
    try:
        record = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"expected JSON, got something else ({error})") from None
    if not isinstance(record, dict) or "sha256" not in record:
        raise ValueError('expected the SHA-256 of its content under "sha256", got none')
    recorded = record.pop("sha256")
    if recorded != (digest := _digest(record)):
        raise ValueError(f"content changed since it was written: expected SHA-256 {recorded}, got {digest}")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(record, option=orjson.OPT_SORT_KEYS)).hexdigest()


LOCK = ".lock"


def take_lock(handle: int, operation: int, file: Path, *, posix: bool = False) -> None:
    """Locks the open `file` by flock, or with `posix` by lockf, as `operation` of fcntl says.

    Raises:
        BlockingIOError: another process holds the lock, and `operation` does not wait.
        OSError: another reason, which names `file`; its number is ENOLCK where the file system has no locks.
    """
    try:
        (fcntl.lockf if posix else fcntl.flock)(handle, operation)
    except OSError as error:
        number, reason = error.errno, error.strerror
        if number == errno.EACCES:  # lockf's other name for it
            number = errno.EAGAIN
        elif number in (errno.ENOSYS, errno.EOPNOTSUPP):
            number = errno.ENOLCK
        raise OSError(number, reason, str(file)) from None


@contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time run the block, for `folder`, which is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as stream:
        take_lock(stream.fileno(), fcntl.LOCK_EX, folder / LOCK)
        yield


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks `folder` for this process. Raises UserError with the host and process that hold the lock already, and
    OSError as `take_lock` does."""
    file = folder / LOCK
    while True:
        stream = file.open("a+")
        try:
            take_lock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, file, posix=True)
        except OSError as error:
            with stream:
                stream.seek(0)
                holder = stream.read().strip() or "another process"
            if not isinstance(error, BlockingIOError):
                raise
            raise UserError(
                f"{folder}: expected a folder that no other process writes to, but {holder} is preparing it; "
                "wait for it, or choose another --out"
            ) from None
        # The previous holder may have removed the file after we opened it and before we locked it.
        if file.exists() and os.fstat(stream.fileno()).st_ino == file.stat().st_ino:
            break
        stream.close()
    try:
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on host {socket.gethostname()}")
        stream.flush()
        yield
    finally:
        file.unlink(missing_ok=True)
        stream.close()
