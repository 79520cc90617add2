"""The pieces of a vocabulary in readable form, and the number of characters of each."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""SentencePiece's pieces for the bytes of characters without a piece, if it was trained with byte_fallback."""
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTED]
BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + number): byte for number, byte in enumerate(_HIDDEN)}
"""The byte of each character of a byte-level piece, as in GPT-2 (https://github.com/openai/gpt-2)."""
_PART = re.compile("[\udc80-\udcbf]+|[\udcc0-\udcff][\udc80-\udcbf]*")
"""The end of a character that begins in another piece, or the beginning of one that ends in another."""


def read_pieces(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the displayed piece of each of `size` ids, and its number of characters (size,) int64, at least one.

    A piece is displayed as the tokenizer writes it. A byte-level piece is displayed as its text: spaces as U+2581,
    control characters and the bytes of a partial character as \\xNN. The marks of WordPiece and SentencePiece do not
    count as characters; a byte of SentencePiece counts as one, and so does a partial character.
    """
    pieces = ["" if piece is None else piece for piece in tokenizer.convert_ids_to_tokens(list(range(size)))]
    decoder: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if type(decoder).__name__ == "ByteLevel":
        added = set(tokenizer.get_added_vocab())
        texts = [piece if piece in added else _text(piece) for piece in pieces]
        shown = tuple("".join(map(_readable_character, text)) for text in texts)
        return shown, _lengths(_PART.sub("?", text).removeprefix(" ") for text in texts)
    single = BYTE_PIECES if set(pieces) >= BYTE_PIECES else frozenset()
    texts = ["?" if piece in single else piece.removeprefix("##").removeprefix("\u2581") for piece in pieces]
    return tuple(pieces), _lengths(texts)


def _text(piece: str) -> str:
    """Returns the text of a byte-level piece, with invalid UTF-8 bytes as U+DC80 to U+DCFF."""
    if any(character not in BYTES for character in piece):
        return piece
    return bytes(BYTES[character] for character in piece).decode("utf-8", "surrogateescape")


def _readable_character(character: str) -> str:
    code = ord(character)
    if character in " \n\t":
        return {" ": "\u2581", "\n": "\\n", "\t": "\\t"}[character]
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if unicodedata.category(character) == "Cc":
        return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"
    return character


def _lengths(texts: Iterable[str]) -> np.ndarray:
    return np.array([max(1, len(text)) for text in texts], np.int64)
