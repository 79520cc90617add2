"""The files of a corpus: found in folders, by patterns or at addresses such as s3://bucket/wiki, opened as bytes."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import lzma
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, kind_of, missing_file
from terakoya.log import hide_secrets
from terakoya.object_store import open_file_system, remote_errors

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Format = Literal["jsonl", "txt", "csv", "tsv", "parquet"]
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
FORMATS: tuple[Format, ...] = ("jsonl", "txt", "csv", "tsv", "parquet")
_FORMATS_BY_ENDING = {f".{format}": format for format in FORMATS}
_ENDINGS = (
    f"{', '.join(f'.{format}' for format in FORMATS)} (all but parquet also compressed: {', '.join(COMPRESSIONS)})"
)
# pathlib folds the two slashes of an address into one.
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/{1,3}(?=[^/])")
_HUB_REVISION = re.compile(r"hf://(?:datasets/|spaces/|models/)?[^/@]+/[^/@]+@(?!main(?:/|$))[^/]+")


@dataclass(frozen=True)
class RemoteFile:
    """A file that fsspec reads.

    Attributes:
        address: for example `s3://bucket/wiki/a.jsonl`; a password in it is used, and not shown by `str` and `repr`.
        version: the store's identifier of the content (an ETag, a hash); empty if it has none.
    """

    address: str = field(repr=False)
    version: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return PurePosixPath(self.address).name

    def stat(self) -> SimpleNamespace:
        """Returns `st_size`, and as `st_mtime_ns` anything that distinguishes versions of the content."""
        with _convert_errors(self.address):
            info = _file_system(self.address).info(self.address)
        version = _version(info) or str(info.get("mtime") or info.get("created") or "")
        return SimpleNamespace(st_size=int(info["size"]), st_mtime_ns=version)

    def open(self, mode: Literal["rb"] = "rb") -> io.BufferedIOBase:
        """Opens the content as a seekable stream, which fetches ranges as they are read."""
        with _convert_errors(self.address):
            return _file_system(self.address).open(self.address, mode)

    def __str__(self) -> str:
        return hide_secrets(self.address)


Source = Path | RemoteFile


def format_of(file: Source) -> Format | None:
    """Returns the format that the name of `file` means, None if it is not a corpus file."""
    name, ending = _split_ending(file.name)
    if ending in COMPRESSIONS:
        ending = _split_ending(name)[1]
        return None if ending == ".parquet" else _FORMATS_BY_ENDING.get(ending)
    return _FORMATS_BY_ENDING.get(ending)


def compression_of(file: Source) -> str | None:
    """Returns `gzip`, `zstd`, `xz`, `bzip2`, or None for a plain file."""
    return COMPRESSIONS.get(_split_ending(file.name)[1])


def _split_ending(name: str) -> tuple[str, str]:
    """Returns a file's name in small letters without its ending, and the ending with its dot."""
    name, dot, ending = name.lower().rpartition(".")
    return name, dot + ending


def find_files(sources: Sequence[Path | str | RemoteFile]) -> tuple[Source, ...]:
    """Returns the corpus files of `sources`, in their order.

    A folder means the corpus files in it, a pattern the files that it matches, both sorted by path, and each file once.
    In a folder, links are followed, and what has a name that begins with a dot is left out. Raises UserError for a
    missing file or folder, for an unknown file name ending, for a name that is not UTF-8, and for an address without a
    pinned revision.
    """
    files: list[Source] = []
    for source in sources:
        if isinstance(source, RemoteFile):
            files.append(source)
        elif (match := _ADDRESS.match(str(source))) is not None and not Path(source).exists():
            files += _remote_files(match[1], str(source)[match.end() :])
        elif glob.has_magic(str(source)) and not Path(source).exists():
            matches = sorted(glob.glob(str(source), recursive=True))  # noqa: PTH207 - Path's takes no absolute pattern
            if not matches:
                raise UserError(f"corpus: no file matches {source}")
            below = [file for path in matches for file in _local_files(Path(path))]
            files += dict.fromkeys(below)  # text/** matches folders and, once more, the files in them
        else:
            files += _local_files(Path(source))
    if not files:
        raise UserError("corpus: expected at least one file, got none")
    for file in files:
        if not _is_utf8(str(file)):
            name = ascii(str(file))
            raise UserError(f"{name}: expected a name in UTF-8; rename the file or its folder")
    return tuple(files)


def _is_utf8(name: str) -> bool:
    """Whether `name` can be written: Python reads other bytes of a file's name as lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _local_files(source: Path) -> list[Path]:
    if source.is_dir():
        if kind_of(source) not in ("corpus", None):
            raise UserError(f"{source}: expected a corpus, got {describe_found(source, 'corpus')}")
        files = sorted(file for file in _files_below(source) if file.is_file() and format_of(file) is not None)
        if not files:
            raise UserError(f"{source}: expected files ending in {_ENDINGS}, found none")
        return files
    if not source.is_file():
        raise UserError(f"{source}: {_hub_hint(source) or missing_file(source)}")
    if format_of(source) is None:
        if hint := _format_hint(source):
            raise UserError(f"{source}: expected a file name ending in {_ENDINGS}; {hint}")
        raise UserError(f"{source}: expected a file name ending in {_ENDINGS}")
    return [source]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yields what is below `folder` and is no folder, but for hidden names. Links are followed, and each folder is read
    once, under its own path if it is below `folder`.

    Raises UserError for a folder that cannot be read, and for a link to nothing: its text would be missing.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); correct its permissions or remove it")

    seen: set[tuple[int, int]] = set()
    roots = [folder]
    for root in roots:  # links are added, so that they come after all that is below `folder` itself
        for path, folders, names in os.walk(root, onerror=refuse):
            parent = Path(path)
            identity = (parent.stat().st_dev, parent.stat().st_ino)
            if identity in seen:
                folders.clear()
                continue
            seen.add(identity)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            roots += [parent / name for name in folders if (parent / name).is_symlink()]
            for file in (parent / name for name in names if not name.startswith(".")):
                if not file.exists():
                    raise UserError(
                        f"{file}: is a link to {file.readlink()}, which does not exist; correct the link or remove it"
                    )
                yield file


def _hub_hint(source: Path) -> str:
    """Says how a data set of the Hub is written, where the missing `source` may be its name."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or source.suffix or source.parent.is_dir():
        return ""
    return f"no such file; a data set of the Hugging Face Hub is written hf://datasets/{source}@REVISION/FILE"


def _format_hint(source: Path) -> str:
    """Says how a file of a known other format becomes a corpus."""
    with source.open("rb") as stream:
        start = stream.read(256).lstrip()
    if start.startswith(b"[") and source.suffix == ".json":
        return f"it is one JSON array: write a line for each document: jq -c '.[]' {source} > {source.stem}.jsonl"
    if source.suffix == ".json":
        return f"if each line is one JSON object, rename it to {source.stem}.jsonl, else: jq -c . {source}"
    return _HINTS.get(source.suffix.lower(), "")


_HINTS = {
    **dict.fromkeys((".html", ".htm", ".xml"), "extract its text first, for example with trafilatura"),
    ".pdf": "extract its text first, for example with pdftotext",
    **dict.fromkeys((".docx", ".doc", ".odt", ".rtf", ".epub"), "extract its text first, for example with pandoc"),
    **dict.fromkeys((".arrow", ".feather"), 'convert it first: datasets.load_from_disk(...).to_parquet("c.parquet")'),
    **dict.fromkeys((".zip", ".tar", ".tgz"), "unpack it first"),
}
"""Ending of a file that is no corpus -> what to do."""


# --------------------------------------------------------------------------------------------------------- remote


def _remote_files(protocol: str, rest: str) -> list[RemoteFile]:
    address = f"{protocol}://{'/' if protocol == 'file' else ''}{rest}"
    if protocol == "hf" and not _HUB_REVISION.match(address):
        raise UserError(
            f"{hide_secrets(address)}: expected a revision, as in hf://datasets/NAME/SET@REVISION/...: without one, "
            "or with main, the data can change between two runs of the same command; take the commit that the "
            "dataset's page shows"
        )
    with _convert_errors(address):
        system = _file_system(address)
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
            files.append(RemoteFile(full, _version(system.info(full))))
    if not files:
        raise UserError(f"{hide_secrets(address)}: expected files ending in {_ENDINGS}, found none")
    for file in files:
        if format_of(file) is None:
            raise UserError(f"{file}: expected a file name ending in {_ENDINGS}")
    return files


def _is_hidden(name: str, given: set[str]) -> bool:
    """Whether a part of `name` begins with a dot, other than those that are `given` in the address."""
    return any(part.startswith(".") and part not in given for part in name.split("/"))


def _file_system(address: str) -> AbstractFileSystem:
    return open_file_system(address, extra="data")


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


# -------------------------------------------------------------------------------------------------------- content


def has_version(file: Source) -> bool:
    """Whether the store of `file` keeps a hash of its content."""
    return isinstance(file, RemoteFile) and bool(file.version)


def content_hash(file: Source) -> str:
    """Returns a hash of the content of `file`: the one that an object store keeps, or of its bytes, read whole."""
    if isinstance(file, RemoteFile) and file.version:
        return file.version
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class HashingReader(io.RawIOBase):
    """A stream, read from start to end, that hashes the bytes that are read, as `content_hash` does."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream, self._hash, self.count = stream, hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        self._hash.update(memoryview(buffer)[:count])
        self.count += count
        return count

    def tell(self) -> int:
        return self.count

    def digest(self) -> str:
        """Returns the hash of the `count` bytes read so far."""
        return self._hash.hexdigest()


@contextmanager
def open_decompressed(
    file: Source, hashing: list[HashingReader] | None = None
) -> Iterator[tuple[io.BufferedIOBase, io.BufferedIOBase]]:
    """Opens `file`; yields a stream of decompressed bytes, and the stream below it, whose position shows the progress.

    Appends to `hashing` the reader that hashes the bytes on disk. Reading, and leaving the block, raise UserError for a
    damaged or truncated compressed file, and OSError where the system cannot read it.
    """
    compression = compression_of(file)
    with file.open("rb") as opened:
        raw: io.BufferedIOBase = opened
        if hashing is not None:
            hashing.append(HashingReader(opened))
            raw = io.BufferedReader(hashing[-1], 1 << 20)
        if compression is None:
            yield raw, raw
            return
        try:
            yield _decompress(compression, raw, file), raw
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            raise_system_error(error, file)
            if compression == "zstd" and "memory" in str(error):
                raise UserError(
                    f"{file}: was compressed with a long window (zstd --long), which is not read here; compress it "
                    f"again: zstd -dc --long=31 {file} | zstd -o NEW.zst"
                ) from error
            raise UserError(
                f"{file}: expected a whole {compression} file, got a damaged or truncated one ({error}); get or make "
                "the file again"
            ) from error


def raise_system_error(error: Exception, file: Source) -> None:
    """Raises OSError, which names `file`, if `error` is the system's, such as of a broken disk; the errors of a damaged
    file have no number."""
    if isinstance(error, OSError) and error.errno is not None:
        raise OSError(error.errno, error.strerror, str(file)) from error


def _decompress(compression: str, raw: io.BufferedIOBase, file: Source) -> io.BufferedIOBase:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if compression == "xz":
        return lzma.LZMAFile(cast(IO[bytes], raw))
    if compression == "bzip2":
        return bz2.BZ2File(raw)
    # pyarrow's stream raises an error if the end is missing; that of the package zstandard ends there silently.
    pa = import_pyarrow(file)
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"), 1 << 20)


def import_pyarrow(file: Source) -> Any:
    """Imports pyarrow. Raises UserError that names the extra if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f'{file}: reading it needs pyarrow: pip install "terakoya[data]"') from error
    return pyarrow
