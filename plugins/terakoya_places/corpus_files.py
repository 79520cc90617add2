"""The files of a corpus at addresses such as s3://bucket/wiki, which fsspec reads."""

from __future__ import annotations

import glob
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, Literal

from terakoya.corpus.files import format_of
from terakoya.errors import UserError
from terakoya.log import hide_secrets
from terakoya_places.object_folder import open_file_system, remote_errors

_HUB_REVISION = re.compile(r"hf://(?:datasets/|spaces/|models/)?[^/@]+/[^/@]+@(?!main(?:/|$))[^/]+")


@dataclass(frozen=True)
class ObjectFile:
    """A file that fsspec reads.

    Attributes:
        path: for example `s3://bucket/wiki/a.jsonl`; a password in it is used, and not shown by `str` and `repr`.
        version: the store's identifier of the content (an ETag, a hash); empty if it has none.
    """

    path: str = field(repr=False)
    version: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return PurePosixPath(self.path).name

    def stat(self) -> SimpleNamespace:
        """Returns `st_size`, and as `st_mtime_ns` anything that distinguishes versions of the content."""
        with _convert_errors(self.path):
            info = open_file_system(self.path).info(self.path)
        version = _version(info) or str(info.get("mtime") or info.get("created") or "")
        return SimpleNamespace(st_size=int(info["size"]), st_mtime_ns=version)

    def open(self, mode: Literal["rb"] = "rb") -> io.BufferedIOBase:
        """Opens the content as a seekable stream, which fetches ranges as they are read."""
        with _convert_errors(self.path):
            return open_file_system(self.path).open(self.path, mode)

    def __str__(self) -> str:
        return hide_secrets(self.path)


def find_files(address: str) -> list[ObjectFile]:
    """Returns the files at `address`: all with a known ending in a folder, those that a pattern matches, or the file
    itself. Raises UserError where they cannot be read, and where an address of the Hub has no pinned revision."""
    protocol, rest = address.split("://", 1)
    if protocol == "hf" and not _HUB_REVISION.match(address):
        raise UserError(
            f"{hide_secrets(address)}: expected a revision, as in hf://datasets/NAME/SET@REVISION/...: without one, "
            "or with main, the data can change between two runs of the same command; take the commit that the "
            "dataset's page shows"
        )
    with _convert_errors(address):
        system = open_file_system(address)
        given = set(rest.split("/"))
        if glob.has_magic(rest):
            names = [name for name in system.glob(address) if not _is_hidden(name, given) and not system.isdir(name)]
        elif system.isdir(address):
            found = (name for name in system.find(address) if not _is_hidden(name, given))
            names = [name for name in found if format_of(Path(name)) is not None]
        else:
            names = [address]
        files = []
        for name in sorted(names):
            full = name if name == address else str(system.unstrip_protocol(name))
            assert protocol != "hf" or _HUB_REVISION.match(full), f"{full}: listed without its revision"
            files.append(ObjectFile(full, _version(system.info(full))))
    return files


def _is_hidden(name: str, given: set[str]) -> bool:
    """Whether a part of `name` begins with a dot, other than those that are `given` in the address."""
    return any(part.startswith(".") and part not in given for part in name.split("/"))


@contextmanager
def _convert_errors(address: str) -> Iterator[None]:
    """Raises UserError in place of the errors of missing files, of the network and of a store's library."""
    shown = hide_secrets(address)
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{shown}: no such file") from None
    except remote_errors() as error:
        reason = hide_secrets(str(error)) or type(error).__name__
        raise UserError(
            f"{shown}: cannot be read ({reason}); check the address, your credentials and the network"
        ) from error


def _version(info: dict[str, Any]) -> str:
    """Returns an object store's identifier of a file's content, "" if it has none."""
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    for value in (sha256, info.get("blob_id"), info.get("ETag"), info.get("md5Hash"), info.get("etag")):
        if value:
            return str(value)
    return ""
