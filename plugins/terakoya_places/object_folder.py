"""Folders at addresses such as s3://bucket/run, through fsspec: objects are read, written, listed and removed by name.

Credentials come from the environment, profiles and roles that the store's library knows, never from settings.
"""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from terakoya.atomic_files import FileFacts
from terakoya.errors import FileError, TemporaryFailure, UserError
from terakoya.log import hide_secrets

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CHUNK_BYTES = 8 << 20
"""How much of an object is read at a time."""
THREADS = 4
"""How many files are sent, fetched or read back at the same time."""
EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
"""AWS's codes of errors for temporary credentials that have run out."""


def open_file_system(address: str, **options: Any) -> AbstractFileSystem:
    """Returns fsspec's file system of `address`. Raises UserError where the library of its scheme is missing, or where
    there is none."""
    shown = hide_secrets(address)
    try:
        from fsspec.core import url_to_fs

        system: AbstractFileSystem = url_to_fs(address, **options)[0]
        return system
    except ImportError as error:
        raise UserError(f'{shown}: {error}; pip install "terakoya[places]"') from error
    except ValueError as error:
        raise UserError(
            f"{shown}: expected an address such as s3://, gs:// or hf://, got {hide_secrets(str(error))}"
        ) from error


def remote_errors() -> tuple[type[BaseException], ...]:
    """Returns the errors of those libraries behind fsspec that are loaded; not all of them are an OSError."""
    names = [
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
        ("google.auth.exceptions", "GoogleAuthError"),
        ("gcsfs.retry", "HttpError"),
        ("azure.core.exceptions", "AzureError"),
        ("aiohttp", "ClientError"),
        ("httpx", "HTTPError"),
        ("httpx2", "HTTPError"),
    ]
    return (OSError, *(getattr(sys.modules[module], name) for module, name in names if module in sys.modules))


def has_expired(error: BaseException) -> bool:
    """Whether `error` says that the credentials were good until some time ago."""
    told = (getattr(each, "response", None) for each in (error, error.__cause__))
    codes = [each["Error"].get("Code") for each in told if isinstance(each, dict) and "Error" in each]
    return any(code in EXPIRED_CODES for code in codes)


def cache_folder() -> Path:
    """Returns the user's folder for what terakoya can make or fetch again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "terakoya"


def cache_name(address: str) -> str:
    """Returns a name for what is kept here of `address`: its last part and a hash of it all."""
    return f"{address.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(address.encode()).hexdigest()[:10]}"


class ObjectFolder:
    """The objects below an address, by their names relative to it. May be used by several threads; picklable.

    Every method raises FileNotFoundError for an object that is not there, UserError where credentials or rights are
    missing, and TemporaryFailure where the store does not answer.
    """

    def __init__(self, address: str) -> None:
        """Opens `address`, for example `s3://bucket/run`. Raises UserError where its library is missing."""
        self.address = address.rstrip("/")
        self._open = partial(open_file_system, self.address, use_listings_cache=False)
        self._system = self._open()
        self._root = str(self._system._strip_protocol(self.address))
        self._renames = self.address.startswith(("file:", "local:"))  # a write there is not all or nothing by itself

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectFolder, (self.address,)

    def __str__(self) -> str:
        return hide_secrets(self.address)

    def read(self, name: str) -> bytes:
        """Returns the object `name`."""
        with self._convert_errors(name):
            content: bytes = self._system.cat_file(self._path(name))
            return content

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop) of the object `name`."""
        with self._convert_errors(name):
            content: bytes = self._system.cat_file(self._path(name), start=start, end=stop)
            return content

    def write(self, name: str, content: bytes) -> None:
        """Writes the object `name`, whole or not at all."""
        with self._convert_errors(name), self._target(name) as path:
            self._system.pipe_file(path, content)

    def upload(self, file: Path, name: str) -> None:
        """Writes the content of `file` as the object `name`, whole or not at all."""
        with self._convert_errors(name), self._target(name) as path:
            self._system.put_file(str(file), path)

    def download(self, name: str, file: Path) -> FileFacts:
        """Writes the object `name` into `file`, and returns the size and hash of what came. Raises FileError where the
        disk takes no more."""
        with file.open("wb", buffering=0) as stream:
            return self._read_all(name, lambda chunk: _write_all(stream, chunk, file))

    def facts(self, name: str) -> FileFacts:
        """Reads the object `name` back, and returns its size and hash."""
        return self._read_all(name, len)

    def compare(self, files: Mapping[str, FileFacts], below: str = "") -> list[str]:
        """Reads `files` in the folder `below` back; returns a line for each that is missing or another one."""

        def find_problem(name: str) -> str | None:
            try:
                return None if self.facts(f"{below}{name}") == files[name] else f"{name}: content changed"
            except FileNotFoundError:
                return f"{name}: missing"

        with ThreadPoolExecutor(THREADS, "terakoya-compare") as pool:
            return [problem for problem in pool.map(find_problem, files) if problem is not None]

    def sizes(self, below: str = "") -> dict[str, int]:
        """Returns the size in bytes of every object, or of those in the folder `below`, by its name, in order."""
        with self._convert_errors(below):
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._path(below), detail=True)
            except FileNotFoundError:
                return {}
        cut = len(self._root) + 1
        return {name[cut:]: int(facts["size"] or 0) for name, facts in sorted(found.items()) if len(name) > cut}

    def find_time(self, name: str) -> float | None:
        """Returns when the object `name` was written, in seconds since 1970; None where the store does not say."""
        with self._convert_errors(name):
            try:
                return float(self._system.modified(self._path(name)).timestamp())
            except NotImplementedError:
                return None

    def remove(self, names: Sequence[str]) -> None:
        """Removes the objects `names`, in this order; those that are not there are none."""
        for name in names:
            with suppress(FileNotFoundError), self._convert_errors(name):
                self._system.rm_file(self._path(name))

    def _reopen(self) -> None:
        """Lets the next call look for credentials again: libraries keep those that they found in a file or variable."""
        self._system = self._open(skip_instance_cache=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _read_all(self, name: str, take: Callable[[bytes], Any]) -> FileFacts:
        """Gives `take` the object `name` in chunks; returns its size and hash."""
        digest, size = hashlib.sha256(), 0
        with (
            self._convert_errors(name),
            self._system.open(self._path(name), "rb", block_size=CHUNK_BYTES, cache_type="readahead") as stream,
        ):
            while chunk := stream.read(CHUNK_BYTES):
                take(chunk)
                digest.update(chunk)
                size += len(chunk)
        return FileFacts(size=size, sha256=digest.hexdigest())

    @contextmanager
    def _target(self, name: str) -> Iterator[str]:
        """Yields the path to write `name` to; on a disk it gets its name at the end."""
        path = self._path(name)
        if not self._renames:
            yield path
            return
        self._system.makedirs(self._system._parent(path), exist_ok=True)
        draft = f"{self._system._parent(path)}/.{uuid.uuid4().hex}.tmp"
        try:
            yield draft
            Path(draft).replace(path)
        finally:
            Path(draft).unlink(missing_ok=True)

    @contextmanager
    def _convert_errors(self, name: str) -> Iterator[None]:
        shown = hide_secrets(f"{self.address}/{name}" if name else self.address)
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{shown}: no such object") from error
        except remote_errors() as error:
            reason = hide_secrets(str(error)) or type(error).__name__
            if has_expired(error):
                self._reopen()
                raise TemporaryFailure(
                    f"{shown}: the credentials have expired ({reason}); renew them where they come from"
                ) from error
            if isinstance(error, PermissionError) or type(error).__name__ in (
                "NoCredentialsError",
                "PartialCredentialsError",
                "DefaultCredentialsError",
            ):
                self._reopen()
                raise UserError(f"{shown}: no access ({reason}); check the address and your credentials") from error
            raise TemporaryFailure(f"{shown}: the store does not answer ({reason})") from error


def _write_all(stream: IO[bytes], content: bytes, file: Path) -> None:
    """Writes `content` into the unbuffered `stream` of `file`. Raises FileError."""
    view = memoryview(content)
    try:
        while view:
            view = view[stream.write(view) :]
    except OSError as error:
        raise FileError(f"{file}: {error.strerror}", error.errno) from error
