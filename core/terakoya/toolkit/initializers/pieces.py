"""The texts that the pieces of a tokenizer stand for, so that the vocabularies of any two tokenizers compare.

The same text is `東京` in WordPiece, `▁東京` or `東京` in SentencePiece, and `æĿ±äº¬` in byte-level BPE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("cls", "sep", "mask", "eos", "bos", "pad", "unk")
"""The first one counts where a piece has several: the end of a text, as in GPT-2's, is learnt, padding is not."""
SPACE = "\u2581"
"""SentencePiece's mark of a space."""
INSIDE = "##"
"""WordPiece's mark of a piece inside a word."""
FIRST_UNSPACED = 0x2E80
"""The first code point of CJK radicals; scripts with spaces are below, except Hangul."""
HANGUL = range(0xAC00, 0xD7B0)

Marks = Literal["bytes", "space", "inside", "none"]
"""What the pieces of a vocabulary look like: byte-level BPE's characters, SentencePiece's space, WordPiece's ##."""


@dataclass(frozen=True)
class PieceText:
    """What a piece stands for.

    Attributes:
        text: UTF-8, perhaps a part of a character, without the space that the piece begins with.
        begins_word: whether the piece begins with a space or, in WordPiece, is no piece inside a word. None where the
            vocabulary does not tell: there is no space before, and the text is in a script without spaces.
    """

    text: bytes
    begins_word: bool | None

    @property
    def is_unspaced(self) -> bool:
        """Whether the text begins in a script that has no spaces between words: kanji, kana, their signs."""
        code = ord(self.text.decode(errors="replace")[:1] or " ")
        return code >= FIRST_UNSPACED and code not in HANGUL and code != ord("\ufffd")


class Pieces:
    """The pieces of `tokenizer`, with their texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: Mapping[str, int] = tokenizer.get_vocab()
        """Piece -> id."""
        added = tokenizer.added_tokens_decoder
        self.special = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        """The ids that stand for no text."""
        self._plain = {token.content for token in added.values()}
        self.marks = _marks(self.ids)

    @property
    def size(self) -> int:
        """The largest id and one more."""
        return max(self.ids.values(), default=-1) + 1

    def role_ids(self) -> dict[str, int]:
        """Returns role (`pad`, `mask`, ...) -> id, without the roles that no piece has."""
        ids = {role: getattr(self.tokenizer, f"{role}_token_id", None) for role in ROLES}
        return {role: id for role, id in ids.items() if id is not None}

    @cached_property
    def texts(self) -> dict[int, PieceText]:
        """Id -> text, of every piece that stands for text."""
        return {id: self._text(piece) for piece, id in self.ids.items() if id not in self.special}

    @cached_property
    def by_text(self) -> dict[tuple[bytes, bool], int]:
        """Text, and whether it begins a word -> the lowest id of the pieces that stand for it."""
        texts = sorted(self.texts.items(), reverse=True)
        return {(each.text, bool(each.begins_word)): id for id, each in texts}

    def find(self, wanted: PieceText) -> int | None:
        """Returns the id of the piece with this text; where there is none, of the one that differs in the space or mark
        before it alone. None where there is neither."""
        begins_word = self._begins_word(wanted)
        id = self.by_text.get((wanted.text, begins_word))
        return self.by_text.get((wanted.text, not begins_word)) if id is None else id

    def divide(self, wanted: PieceText) -> list[int]:
        """Returns the ids of the pieces that this tokenizer divides a text into, without special ones; it is empty for
        a text of unknown characters alone."""
        begins_word = self._begins_word(wanted)
        ids = self._divide_word(wanted.text, begins_word)
        return [id for id in ids if id in self.texts] or self._longest_pieces(wanted.text, begins_word)

    def _begins_word(self, wanted: PieceText) -> bool:
        """Whether a piece of this vocabulary with the text `wanted` is one that begins a word. A script without spaces
        begins one in WordPiece, unless `wanted` is inside one; nowhere else it has a space before it."""
        if wanted.is_unspaced:
            return self.marks == "inside" and wanted.begins_word is not False
        return bool(wanted.begins_word)

    def _divide_word(self, text: bytes, begins_word: bool) -> Sequence[int]:
        """The tokenizer's own pieces of a text, where its model takes one without splitting words."""
        if self.marks == "inside" and not begins_word:
            return ()  # a WordPiece model takes whole words alone
        if self.marks == "bytes":
            word = "".join(_CHARACTERS[byte] for byte in b" " * begins_word + text)
        else:
            try:
                word = text.decode()
            except UnicodeDecodeError:
                return ()
            if self.marks == "space":
                word = (SPACE * begins_word + word).replace(" ", SPACE)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return [token.id for token in backend.model.tokenize(word)]
        ids: list[int] = self.tokenizer.convert_tokens_to_ids(self.tokenizer.tokenize(word.replace(SPACE, " ")))
        return ids

    def _longest_pieces(self, text: bytes, begins_word: bool) -> list[int]:
        """From left to right the longest pieces; bytes that begin none are left out."""
        found: list[int] = []
        at = 0
        while at < len(text):
            for end in range(len(text), at, -1):
                begins = begins_word and at == 0
                id = self.by_text.get((text[at:end], begins), self.by_text.get((text[at:end], not begins)))
                if id is not None:
                    found.append(id)
                    at = end
                    break
            else:
                at += 1
        return found

    def _text(self, piece: str) -> PieceText:
        if piece in self._plain:
            return _split_space(piece.encode())
        if self.marks == "bytes":
            return _split_space(_from_characters(piece))
        if self.marks == "inside":
            return PieceText(piece.removeprefix(INSIDE).encode(), not piece.startswith(INSIDE) or piece == INSIDE)
        if self.marks == "space":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return PieceText(bytes.fromhex(piece[3:5]), False)
            return _split_space(piece.replace(SPACE, " ").encode())
        return PieceText(piece.encode(), True)


def _split_space(text: bytes) -> PieceText:
    """A text with the space it begins with; a single space stays text."""
    if text.startswith(b" ") and text != b" ":
        return PieceText(text[1:], True)
    return PieceText(text, None if PieceText(text, None).is_unspaced else False)


def _marks(pieces: Mapping[str, int]) -> Marks:
    """What the pieces look like."""
    if pieces.keys() >= _BYTES.keys():
        return "bytes"
    if any(piece.startswith(SPACE) for piece in pieces):
        return "space"
    return "inside" if any(piece.startswith(INSIDE) for piece in pieces) else "none"


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable character of each byte -> the byte: itself where it is printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}


def _from_characters(piece: str) -> bytes:
    """The bytes of a piece of byte-level BPE; of one in other characters, its UTF-8."""
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return piece.encode()
