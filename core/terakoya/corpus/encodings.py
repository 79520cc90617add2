"""Text that is not UTF-8: its encoding is recognised.

What is recognised is what Japanese files have: Shift_JIS as Windows writes it, EUC-JP, ISO-2022-JP, UTF-16, UTF-32 and
any marks of byte order. A text must decode without an error *and* look Japanese in one of them alone: bytes of EUC-JP
are half-width katakana in Shift_JIS, and those of Korean are rare kanji in EUC-JP. Otherwise nothing is guessed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from terakoya.errors import UserError

SAMPLE_BYTES = 1 << 18
"""The bytes, from the first that is not ASCII, from which the encoding is recognised."""
_LOOKED_AT = 1 << 14
"""The characters of them that are looked at."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
WIDE = ("utf-16", "utf-32")
_ASCII = bytes(range(128))
ESCAPE = re.compile(rb"\x1b(?:\$[@B]|\(I|\$\(D)")
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
SHOWN = {"cp932": "Shift_JIS (cp932)", "euc_jp": "EUC-JP", "iso2022_jp_ext": "ISO-2022-JP"}


def find_codec(name: str) -> str:
    """Returns the codec for the encoding that a user calls `name`. Raises UserError if text is not written in it."""
    key = name.lower().replace("-", "_")
    try:
        codec = codecs.lookup(_CODECS.get(key, key)).name
        if codec.startswith(WIDE) or "a\n".encode(codec) == b"a\n":
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
    is_text = _decode(sample, "utf-8", is_whole) is not None
    if is_text and ESCAPE.search(sample):
        return "iso2022_jp_ext"
    if is_text and b"\0" not in sample:
        return "utf-8"
    lines = sample.splitlines()
    rest = [line for line in lines[: None if is_whole else -1] or lines if not is_utf8(line)]
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
    is_safe = best.startswith(WIDE) or (best == "cp932" and texts[other] is None)
    is_enough = kana >= max(2, size // 32) or (is_safe and size >= 20)
    return best if share >= 0.9 and other_share <= 0.6 and is_enough else None


def _decode(sample: bytes, codec: str, is_whole: bool) -> str | None:
    try:
        text = sample.decode(codec) if is_whole else codecs.getincrementaldecoder(codec)().decode(sample)
    except UnicodeDecodeError:
        return None
    return None if codec.startswith(WIDE) and _IMPOSSIBLE.search(text) else text


def _decode_lines(lines: Sequence[bytes], codec: str) -> str | None:
    """Returns what of `lines` the codec has, None if that is less than 99 % of them."""
    texts = []
    for line in lines:
        with suppress(UnicodeDecodeError):
            text = line.decode(codec, error_handler(codec))
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


def is_utf8(line: bytes) -> bool:
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


def error_handler(codec: str) -> str:
    return "terakoya.cp932" if codec in ("euc_jp", "iso2022_jp_ext") else "strict"
