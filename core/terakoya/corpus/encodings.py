"""Text that is not UTF-8: its encoding is recognised, and its bytes are read as those of UTF-8.

What is recognised is what Japanese files have: Shift_JIS as Windows writes it, EUC-JP, ISO-2022-JP, UTF-16, UTF-32 and
any marks of byte order. A text must decode without an error *and* look Japanese in one of them alone: bytes of EUC-JP
are half-width katakana in Shift_JIS, and those of Korean are rare kanji in EUC-JP. Otherwise nothing is guessed.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from typing import Any

from terakoya.corpus.files import HashingReader, Source, compression_of, format_of, open_decompressed
from terakoya.errors import UserError

logger = logging.getLogger("terakoya")

_SAMPLE_BYTES = 1 << 18
"""The bytes, from the first that is not ASCII, from which the encoding is recognised."""
_LOOKED_AT = 1 << 14
"""The characters of them that are looked at."""
_LONGEST_LINE = 128 << 20
_TOLD_FILES = 10
_BAD = b"\xff"
"""Begins a line that its encoding does not have, and that therefore is no UTF-8 either."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WIDE = ("utf-16", "utf-32")
_ASCII = bytes(range(128))
_ESCAPE = re.compile(rb"\x1b(?:\$[@B]|\(I|\$\(D)")
_QUOTED = re.compile(rb'"[^"]*(?:"|\Z)')
_IGNORED = re.compile(r"[\x00-\x7f\uff61-\uff9f]+")
"""ASCII, and half-width katakana, which most bytes of other encodings are in Shift_JIS."""
_IMPOSSIBLE = re.compile(r"[\x00-\x08\x0e-\x19\x1c-\x1f\x7f-\x9f\uf8f0-\uf8f3\ufffe\uffff]")
_KANA = re.compile(r"[\u3041-\u3096\u30a1-\u30fa]")
_LEVEL_1 = bytes(byte for row in range(0xB0, 0xD0) for cell in range(0xA1, 0xFF) for byte in (row, cell))
_JAPANESE = re.compile(
    r"[\u3000-\u3003\u3005-\u301c\u3041-\u309e\u30a1-\u30fe\uff01-\uff5e\u2015\u2025\u2026\u203b\u2190-\u2193"
    rf"\u2460-\u2473\u25a0-\u25cf\u2605\u2606\xd7{_LEVEL_1.decode('euc_jp', 'ignore')}]{{2,}}"
)
"""Two or more characters in a row that are frequent in Japanese: kana, kanji of JIS level 1, signs."""

_CODECS = {
    **dict.fromkeys(("shift_jis", "x_sjis", "windows_31j"), "cp932"),
    **dict.fromkeys(("iso2022_jp", "iso2022_jp_1", "cp50220", "cp50221", "cp50222"), "iso2022_jp_ext"),
    "utf_8_sig": "utf-8",
    **dict.fromkeys(("cp51932", "eucjp_ms", "eucjp_win"), "euc_jp"),
}
"""A name that people give -> the codec that reads what programs write under it, such as ① and 髙."""
_SHOWN = {"cp932": "Shift_JIS (cp932)", "euc_jp": "EUC-JP", "iso2022_jp_ext": "ISO-2022-JP"}


def find_codec(name: str) -> str:
    """Returns the codec for the encoding that a user calls `name`. Raises UserError if text is not written in it."""
    key = name.lower().replace("-", "_")
    try:
        codec = codecs.lookup(_CODECS.get(key, key)).name
        if codec.startswith(_WIDE) or "a\n".encode(codec) == b"a\n":
            return _CODECS.get(codec, codec)
    except (LookupError, UnicodeError):
        pass
    raise UserError(
        "encoding: expected the name of an encoding of text, such as shift_jis, euc-jp, iso-2022-jp or utf-16, got "
        f'"{name}"'
    )


def recognise(sample: bytes, *, is_whole: bool, codec: str | None = None) -> str | None:
    """Returns the codec of the text that begins with `sample`; `codec` where it is not sure.

    Lines that are UTF-8 are left aside where others are not. `is_whole`: `sample` does not end within a character.
    """
    marked = next((encoding for mark, encoding in _MARKS if sample.startswith(mark)), None)
    if marked is not None:
        return marked
    is_utf8 = _decode(sample, "utf-8", is_whole) is not None
    if is_utf8 and _ESCAPE.search(sample):
        return "iso2022_jp_ext"
    if is_utf8 and b"\0" not in sample:
        return "utf-8"
    lines = sample.splitlines()
    rest = [line for line in lines[: None if is_whole else -1] or lines if not _is_utf8(line)]
    narrow = {name: _decode_lines(rest, name) for name in ("cp932", "euc_jp")}
    wide = {name: _decode(sample, name, is_whole) for name in ("utf-16-le", "utf-16-be")}
    for texts in (wide, narrow) if b"\0" in sample else (narrow, wide):
        if (found := _choose(texts)) is not None:
            return found
    if codec is not None:
        return codec
    as_utf8 = sample.decode(errors="ignore").encode()  # a little damage leaves most of it
    return "utf-8" if 2 * len(as_utf8.translate(None, _ASCII)) >= len(sample.translate(None, _ASCII)) else None


def _choose(texts: Mapping[str, str | None]) -> str | None:
    """Returns which of two encodings of a text it is, None where that is not sure."""
    (share, kana, size, best), (other_share, _, _, other) = sorted(
        ((*_look_japanese(text), name) for name, text in texts.items()), reverse=True
    )
    # Kanji alone may be Korean in EUC-JP, and in Shift_JIS the half-width katakana of EUC-JP.
    is_safe = best.startswith(_WIDE) or (best == "cp932" and texts[other] is None)
    is_enough = kana >= max(2, size // 32) or (is_safe and size >= 20)
    return best if share >= 0.9 and other_share <= 0.6 and is_enough else None


def _decode(sample: bytes, codec: str, is_whole: bool) -> str | None:
    try:
        text = sample.decode(codec) if is_whole else codecs.getincrementaldecoder(codec)().decode(sample)
    except UnicodeDecodeError:
        return None
    return None if codec.startswith(_WIDE) and _IMPOSSIBLE.search(text) else text


def _decode_lines(lines: Sequence[bytes], codec: str) -> str | None:
    """Returns what of `lines` the codec has, None if that is less than 99 % of them."""
    texts = []
    for line in lines:
        with suppress(UnicodeDecodeError):
            text = line.decode(codec, _error_handler(codec))
            if not _IMPOSSIBLE.search(text):
                texts.append(text)
    return "\n".join(texts) if len(texts) >= 0.99 * len(lines) else None


def _look_japanese(text: str | None) -> tuple[float, int, int]:
    """Returns which share of the characters of `text` looks Japanese, how many of these are kana, and how many are all.

    ASCII and half-width katakana do not count; ASCII alone looks Japanese, too.
    """
    if text is None:
        return 0.0, 0, 0
    if text.isascii():
        return 1.0, 0, len(text)
    beginning = text[:_LOOKED_AT] if len(_IGNORED.sub("", text[:_LOOKED_AT])) > 20 else text
    runs = "".join(_JAPANESE.findall(beginning))
    return len(runs) / max(1, len(_IGNORED.sub("", beginning))), len(_KANA.findall(runs)), len(runs)


def _is_utf8(line: bytes) -> bool:
    """Whether `line` is ASCII, or UTF-8 with a character of three bytes. One of two bytes is a short word of EUC-JP."""
    try:
        return line.isascii() or max(line.decode()) > "\u07ff"
    except UnicodeDecodeError:
        return False


# ------------------------------------------------------------------------------------------------ codecs of Windows


def _read_extension(error: UnicodeError) -> tuple[str, int]:
    """Decodes a pair of bytes that JIS X 0208 lacks by the table of cp932, as Windows does: ①, ㈱, 髙."""
    if isinstance(error, UnicodeDecodeError) and error.start + 1 < len(error.object):
        first, second = (byte | 0x80 for byte in error.object[error.start : error.start + 2])
        row, cell = first - 0xA0, second - 0xA0
        if 1 <= row <= 94 and 1 <= cell <= 94:
            lead = (row + 1) // 2 + (0x80 if row <= 62 else 0xC0)
            trail = cell + (0x3F + (cell >= 64) if row % 2 else 0x9E)
            return bytes([lead, trail]).decode("cp932"), error.start + 2
    raise error


codecs.register_error("terakoya.cp932", _read_extension)
codecs.register_error("terakoya.bad", lambda error: ("\udcff", getattr(error, "end", 0)))  # no UTF-8 has it


def _error_handler(codec: str) -> str:
    return "terakoya.cp932" if codec in ("euc_jp", "iso2022_jp_ext") else "strict"


# ------------------------------------------------------------------------------------------------------- the stream


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
        while len(chunk) < _SAMPLE_BYTES and (more := self._stream.read(min(len(chunk), _SAMPLE_BYTES - len(chunk)))):
            chunk += more
        return chunk

    def _read_changed(self) -> Iterator[bytes]:
        """Yields bytes of UTF-8, up to the end or to where the stream passes through."""
        chunk, is_first, ends_in_cr = self._read_chunk(), True, False
        while self._codec != "utf-8" and chunk.isascii() and b"\0" not in chunk and not _ESCAPE.search(chunk):
            ends_in_cr = is_first and self._ends_in_cr(chunk)
            if ends_in_cr or not chunk:
                break
            yield chunk
            chunk, is_first = self._read_chunk(), False
        sample = chunk + (self._read_chunk() if len(chunk) == _SAMPLE_BYTES else b"")
        is_whole = len(sample) < 2 * _SAMPLE_BYTES
        codec = recognise(sample, is_whole=is_whole, codec=self._codec) if self._codec != "utf-8" else "utf-8"
        decode = _wide_decoder(codec) if codec is not None and codec.startswith(_WIDE) else None
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
        if codec is not None and not has_utf8 and not codec.startswith(_WIDE):
            has_utf8 = any(_is_utf8(line) and not line.isascii() for line in sample.splitlines())
        parts = ["UTF-8"] * has_utf8 + ([] if codec in ("utf-8", None) else [_SHOWN.get(codec, codec.upper())])
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
        elif chunk and len(held) < _LONGEST_LINE // _SAMPLE_BYTES:
            held.append(chunk)
        else:
            yield _recode_line(b"".join([*held, chunk]), codec)
            held = []


def _recode_line(line: bytes, codec: str) -> bytes:
    """Returns a line as UTF-8: from ISO-2022-JP where it has that's escapes, as it is where it is UTF-8."""
    if _ESCAPE.search(line):
        codec = "iso2022_jp_ext"
    elif _is_utf8(line):
        return line
    try:
        return line.decode(codec, _error_handler(codec)).encode()
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
