"""The files of a corpus: found in folders, by patterns or in places such as s3://bucket/wiki, opened as bytes."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import logging
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, cast

from terakoya.errors import UserError, import_extra
from terakoya.folder_kinds import describe_found, kind_of, missing_file, refuse_pointers
from terakoya.places import PlacedFile, is_local, place_of

Format = Literal["jsonl", "txt", "csv", "tsv", "parquet"]
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
FORMATS: tuple[Format, ...] = ("jsonl", "txt", "csv", "tsv", "parquet")
_FORMATS_BY_ENDING = {f".{format}": format for format in FORMATS}
_ENDINGS = (
    f"{', '.join(f'.{format}' for format in FORMATS)} (all but parquet also compressed: {', '.join(COMPRESSIONS)})"
)


_NAMED = 5
"""Endings of files that are left out of a folder, of which so many are named."""
Source = Path | PlacedFile

logger = logging.getLogger("terakoya")


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


def find_files(sources: Sequence[Source | str] | Path | str) -> tuple[Source, ...]:
    """Returns the corpus files of `sources`, in their order.

    A folder means the corpus files in it, a pattern the files that it matches, both sorted by path, and each file once.
    In a folder, links are followed, and what has a name that begins with a dot is left out. Raises UserError for a
    missing file or folder, for an unknown file name ending, for a name that is not UTF-8, for a pointer of Git LFS, and
    as `Place.find_files`.
    """
    files: list[Source] = []
    for source in [sources] if isinstance(sources, Path | str) else sources:
        if not isinstance(source, Path | str):
            files.append(source)
        elif not is_local(source) and not Path(source).exists():
            files += _placed_files(source)
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
        if re.search("[\ud800-\udfff]", str(file)):  # how Python keeps other bytes of a name
            name = ascii(str(file))
            raise UserError(f"{name}: expected a name in UTF-8; rename the file or its folder")
    refuse_pointers(file for file in files if isinstance(file, Path))
    return tuple(files)


def _placed_files(source: Path | str) -> Sequence[Source]:
    place = place_of(source)
    files = place.find_files()
    if not files:
        raise UserError(f"{place}: expected files ending in {_ENDINGS}, found none")
    for file in files:
        if format_of(file) is None:
            raise UserError(f"{file}: expected a file name ending in {_ENDINGS}")
    return files


def _local_files(source: Path) -> list[Path]:
    if source.is_dir():
        if kind_of(source) not in ("corpus", None):
            raise UserError(f"{source}: expected a corpus, got {describe_found(source, 'corpus')}")
        below = [file for file in _files_below(source) if file.is_file()]
        files = sorted(file for file in below if format_of(file) is not None)
        if not files:
            raise UserError(f"{source}: expected files ending in {_ENDINGS}, found none")
        if others := Counter(file.suffix.lower() or file.name for file in below if format_of(file) is None):
            ordered = sorted(others.items(), key=lambda each: (-each[1], each[0]))
            named = ", ".join(f"{name} {count:,}" for name, count in ordered[:_NAMED])
            _tell_left_out(source, named + ", ..." * (len(others) > _NAMED))
        return files
    if not source.is_file():
        raise UserError(f"{source}: {_hub_hint(source) or missing_file(source)}")
    if format_of(source) is None:
        if hint := _format_hint(source):
            raise UserError(f"{source}: expected a file name ending in {_ENDINGS}; {hint}")
        raise UserError(f"{source}: expected a file name ending in {_ENDINGS}")
    return [source]


@cache  # a command looks at its corpus several times
def _tell_left_out(folder: Path, endings: str) -> None:
    logger.info("%s: files are left out whose endings are none of a corpus: %s", folder, endings)


def _files_below(folder: Path) -> Iterator[Path]:
    """Yields what is below `folder` and is no folder, but for hidden names. Links are followed, and each folder is read
    once, under its own path if it is below `folder`. Raises UserError for a folder that cannot be read, and for a link
    to nothing: its text would be missing."""

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


# -------------------------------------------------------------------------------------------------------- content


def has_version(file: Source) -> bool:
    """Whether the place of `file` keeps a hash of its content."""
    return bool(getattr(file, "version", ""))


def content_hash(file: Source) -> str:
    """Returns a hash of the content of `file`: the one that its place keeps, or of its bytes, read whole."""
    if not isinstance(file, Path) and file.version:
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
    """Returns pyarrow. Raises UserError that names the extra if it is not installed."""
    return import_extra("pyarrow", "data", str(file))
