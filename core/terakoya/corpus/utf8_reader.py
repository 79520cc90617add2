"""Text in any encoding is read as bytes of UTF-8, with lines that end in a line feed."""

from __future__ import annotations

import codecs
import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

from terakoya.corpus.encodings import ESCAPE, SAMPLE_BYTES, SHOWN, WIDE, error_handler, is_utf8, recognise
from terakoya.corpus.files import HashingReader, Source, compression_of, format_of, open_decompressed

logger = logging.getLogger("terakoya")

_LONGEST_LINE = 128 << 20
_TOLD_FILES = 10
_BAD = b"\xff"
"""Begins a line that its encoding does not have, and that therefore is no UTF-8 either."""
_QUOTED = re.compile(rb'"[^"]*(?:"|\Z)')


class Utf8Reader(io.RawIOBase):
    """Reads `stream`, the text of the file called `name`, as UTF-8 with lines that end in a line feed.

    A text in UTF-8 passes through as it is, errors included. In other text, a line that its encoding does not have
    becomes a line that is not UTF-8. Carriage returns become line feeds where lines of the beginning end in nothing
    else. `codec`: see `recognise`; with utf-8, nothing is recognised. The result depends on the bytes alone, not on
    how much is read at once.
    """

    def __init__(self, stream: io.BufferedIOBase, name: str, codec: str | None = None, *, is_csv: bool = False) -> None:
        self._stream, self._name, self._codec, self._is_csv = stream, name, codec, is_csv
        self._chunks = filter(None, self._read_changed())
        self._rest, self._count = memoryview(b""), 0
        self.passes_through = self.is_changed = False
        """Whether the rest of the stream is read as it is; whether any bytes so far are other than the stream's."""

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._count

    def readinto(self, buffer: Any) -> int:
        if not self._rest and not self.passes_through:
            self._rest = memoryview(next(self._chunks, b""))
        if self._rest or not self.passes_through:
            size = min(len(buffer), len(self._rest))
            buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        else:
            size = self._stream.readinto(buffer)
        self._count += size
        return size

    def _read_chunk(self) -> bytes:
        """Returns the next bytes, fewer than a sample only at the end."""
        chunk = self._stream.read(1 << 14)  # most files are small
        while len(chunk) < SAMPLE_BYTES and (more := self._stream.read(min(len(chunk), SAMPLE_BYTES - len(chunk)))):
            chunk += more
        return chunk

    def _read_changed(self) -> Iterator[bytes]:
        """Yields bytes of UTF-8, up to the end or to where the stream passes through."""
        chunk, is_first, ends_in_cr = self._read_chunk(), True, False
        while self._codec != "utf-8" and chunk.isascii() and b"\0" not in chunk and not ESCAPE.search(chunk):
            ends_in_cr = is_first and self._ends_in_cr(chunk)
            if ends_in_cr or not chunk:
                break
            yield chunk
            chunk, is_first = self._read_chunk(), False
        sample = chunk + (self._read_chunk() if len(chunk) == SAMPLE_BYTES else b"")
        is_whole = len(sample) < 2 * SAMPLE_BYTES
        codec = recognise(sample, is_whole=is_whole, codec=self._codec) if self._codec != "utf-8" else "utf-8"
        decode = _wide_decoder(codec) if codec is not None and codec.startswith(WIDE) else None
        if is_first and self._codec != "utf-8":
            ends_in_cr = self._ends_in_cr(sample if decode is None else _wide_decoder(str(codec))(sample))
        if codec != "utf-8" or ends_in_cr:
            self._tell(codec, sample, ends_in_cr=ends_in_cr)
        if codec in ("utf-8", None) and not ends_in_cr:
            self.passes_through = True
            yield sample
            return
        self.is_changed = True
        chunks: Iterator[bytes] = chain([sample], iter(self._read_chunk, b""), [b""])
        if decode is not None:
            chunks = map(decode, chunks)
        if ends_in_cr:
            chunks = _end_in_lf(chunks)
        yield from chunks if decode is not None or codec in ("utf-8", None) else _recode(chunks, str(codec))

    def _ends_in_cr(self, beginning: bytes) -> bool:
        """Whether lines end in carriage returns alone, and next to none in a line feed, those within a csv's quotes
        aside."""
        if b"\r" not in beginning:
            return False
        text = _QUOTED.sub(b"", beginning) if self._is_csv else beginning
        return text.count(b"\r") - text.count(b"\r\n") > 10 * text.count(b"\n")

    def _tell(self, codec: str | None, sample: bytes, *, ends_in_cr: bool) -> None:
        """Says what the text is read as, unless that is plain UTF-8."""
        if codec is None:
            _warn_unsure(self._name)
        has_utf8 = codec in ("utf-8", None)
        if codec is not None and not has_utf8 and not codec.startswith(WIDE):
            has_utf8 = any(is_utf8(line) and not line.isascii() for line in sample.splitlines())
        parts = ["UTF-8"] * has_utf8 + ([] if codec in ("utf-8", None) else [SHOWN.get(codec, codec.upper())])
        parts += ["lines end in CR"] * ends_in_cr
        if parts != ["UTF-8"]:
            _tell_file(self._name, ", ".join(parts))


def _wide_decoder(codec: str) -> Callable[[bytes], bytes]:
    """Returns a function from the next bytes of a text in UTF-16 or UTF-32 to bytes of UTF-8; b"" is the end."""
    decoder = codecs.getincrementaldecoder(codec)("terakoya.bad")

    def decode(chunk: bytes) -> bytes:
        text = decoder.decode(chunk).encode("utf-8", "surrogatepass")
        return text if chunk or not decoder.getstate()[0] else _BAD

    return decode


def _end_in_lf(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields `chunks`, of which the last is empty, with a line feed for each carriage return."""
    held = b""
    for chunk in chunks:
        text = held + chunk
        held = b"\r" if chunk and text.endswith(b"\r") else b""
        yield text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _recode(chunks: Iterable[bytes], codec: str) -> Iterator[bytes]:
    """Yields the lines of `chunks`, of which the last is empty, as UTF-8."""
    held: list[bytes] = []
    for chunk in chunks:
        lines, end, rest = chunk.rpartition(b"\n")
        if end:
            text = b"".join([*held, lines])
            yield b"\n".join([_recode_line(line, codec) for line in text.split(b"\n")]) + end
            held = [rest]
        elif chunk and len(held) < _LONGEST_LINE // SAMPLE_BYTES:
            held.append(chunk)
        else:
            yield _recode_line(b"".join([*held, chunk]), codec)
            held = []


def _recode_line(line: bytes, codec: str) -> bytes:
    """Returns a line as UTF-8: from ISO-2022-JP where it has that's escapes, as it is where it is UTF-8."""
    if ESCAPE.search(line):
        codec = "iso2022_jp_ext"
    elif is_utf8(line):
        return line
    try:
        return line.decode(codec, error_handler(codec)).encode()
    except UnicodeError:
        return _BAD + line


class TextStream(io.BufferedReader):
    """The text of a file as bytes of UTF-8. `disk` is the stream of the file's own bytes."""

    def __init__(self, reader: Utf8Reader, disk: io.BufferedIOBase, *, is_compressed: bool) -> None:
        super().__init__(reader, 1 << 16)
        self.reader, self._disk, self._is_compressed = reader, disk, is_compressed

    @property
    def disk_position(self) -> int:
        """How many bytes of the file are read; somewhat more where they are not those of the text."""
        return (self._disk if self._is_compressed or self.reader.is_changed else self).tell()


@contextmanager
def open_text(
    file: Source, codec: str | None = None, hashing: list[HashingReader] | None = None
) -> Iterator[TextStream]:
    """Opens `file` and yields its text as bytes of UTF-8; see `Utf8Reader`, and `open_decompressed` for the errors and
    `hashing`."""
    with open_decompressed(file, hashing) as (stream, disk):
        reader = Utf8Reader(stream, str(file), codec, is_csv=format_of(file) == "csv")
        yield TextStream(reader, disk, is_compressed=compression_of(file) is not None)


# ---------------------------------------------------------------------------------------------------------- messages


_told: dict[str, set[str]] = {}
"""What files are read as -> their names: the passes over a corpus read each file several times."""
_totals: dict[str, int] = {}


def _tell_file(name: str, shown: str) -> None:
    names = _told.setdefault(shown, set())
    if name not in names and len(names) < _TOLD_FILES:
        logger.info("%s: is read as %s", name, shown)
    names.add(name)


def tell_totals() -> None:
    """Says how many files were read as what, where they were too many to name each."""
    for shown, names in _told.items():
        if len(names) > max(_TOLD_FILES, _totals.get(shown, 0)):
            _totals[shown] = len(names)
            logger.info("%s files in all are read as %s", f"{len(names):,}", shown)


@cache
def _warn_unsure(name: str) -> None:
    logger.warning(
        "%s: is not UTF-8, and it is not sure what it is; name its encoding with --encoding "
        '("encoding" in a pipeline), or convert it: iconv -f NAME -t UTF-8',
        name,
    )
