"""A cache from words to tokens. Words are found by numpy, all at once: a hash of each, and what is stored for the hash.

Looking them up one by one in a dictionary takes nearly twice as long, much of it for making a string of each word.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from terakoya_tokenizer.kernels import address, load_kernels
from terakoya_tokenizer.wordpiece import Pieces

MARK = "\ud800"
"""The first character of an entry that is no word. It cannot be part of a text that MeCab reads."""
LINE_END = f"{MARK}\n"
"""The entry among the words at the end of a line."""

_LINE_END_ID, _NO_ID = -1, -2
_SLOT_BITS = 20
_MANY = 1 << 14
"""From so many characters on, compiled code finds words."""
_NUMBERS = ("id", "start", "stop", "is_first", "characters")
_TOKEN = np.dtype([(name, np.int32) for name in _NUMBERS])
"""A token of a word: its id, the positions in the word of its first character and the one after its last, 1 for the
first token of a word, and for the last one the number of characters of the word. A word without tokens has one with
`_NO_ID`."""
_WORD = np.dtype(
    [
        ("hash", np.uint64),
        ("first_character", np.int64),
        ("first_token", np.int64),
        ("characters", np.int32),
        ("tokens", np.int32),
    ]
)
"""A word: its hash, where its characters and its tokens begin, and how many of both it has. Its space counts."""


class WordCache:
    """The tokens of each word, computed once and stored in flat arrays.

    A web corpus has an unlimited number of words: beyond `max_words` entries the cache is cleared.
    """

    def __init__(
        self, pieces: Callable[[str], Pieces], dtype: np.dtype, *, slots: int = 1, max_words: int = 1_000_000
    ) -> None:
        """`pieces` splits a word; a `LINE_END` has `slots` tokens."""
        self._pieces, self._dtype, self._max_words = pieces, dtype, max_words
        self._line_end = [_LINE_END_ID, 0, 1, 0, 0] * slots
        self._random = np.random.default_rng(0)
        self._clear()

    def __len__(self) -> int:
        return len(self._rows)

    def encode(self, words: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids (T,) of `words` in order, word starts (T,) bool, and the number of tokens (L,) int64 of each
        line, including empty lines. `find` says what `words` are; a line ends at each `LINE_END`."""
        found = self.find(words)
        is_token = np.ones(len(found.ids), dtype=bool)
        is_token[found.line_ends] = False
        lengths = np.diff(found.line_ends, prepend=-1) - 1
        return found.ids[is_token].astype(self._dtype), found.word_starts()[is_token], lengths

    def find(self, words: str) -> FoundTokens:
        """Returns the tokens of `words`, each of which ends with a space; those that are new are added."""
        if len(self) > self._max_words:
            self._clear()
        characters = np.array([words]).view(np.uint32)
        kernels = load_kernels() if len(characters) > _MANY else None
        while True:
            begins, hashes, rows = self._look_up(characters) if kernels is None else self._scan(kernels, characters)
            sizes = np.diff(begins, append=len(characters))
            others = np.flatnonzero(rows == 0)  # those that are new, or have the slot of another word
            if len(others):
                rows[others] = self._add(words, hashes[others], begins[others], (begins + sizes)[others])
            unsure = slice(None) if kernels is None else others
            if self._are_stored(characters, begins[unsure], sizes[unsure], rows[unsure]):
                return FoundTokens(self._tokens_of(np.frombuffer(self._words, _WORD).take(rows)))
            self._clear()  # two words have the same hash; with other factors they do not

    def _look_up(self, characters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns of each word where it begins, its hash, and the row with this hash, 0 where its slot has another one
        or none."""
        ends = np.flatnonzero(characters == ord(" ")) + 1
        begins = np.append(0, ends[:-1])
        sizes = ends - begins
        places = np.arange(len(characters)) - np.repeat(begins, sizes)
        hashes = np.add.reduceat(characters * self._factors_of(int(sizes.max())).take(places), begins)
        rows = self._slots.take(_slots_of(hashes))
        rows[np.frombuffer(self._words, _WORD).take(rows)["hash"] != hashes] = 0
        return begins, hashes, rows

    def _scan(self, kernels: ctypes.CDLL, characters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `_look_up`, much sooner, and only rows that have the words' characters."""
        count = np.count_nonzero(characters == ord(" "))
        begins, hashes, rows = np.empty(count, np.int64), np.empty(count, np.uint64), np.empty(count, np.int32)
        stored: list[np.ndarray] = [np.frombuffer(each, np.uint8) for each in (self._words, self._characters)]
        longest = 64
        while True:
            factors = self._factors_of(longest)
            text = address(characters), len(characters), address(factors), len(factors)
            slots = address(self._slots), _SLOT_BITS
            if kernels.find_words(*text, *slots, *map(address, [*stored, begins, hashes, rows])) >= 0:
                return begins, hashes, rows
            longest *= 2

    def _are_stored(self, characters: np.ndarray, begins: np.ndarray, sizes: np.ndarray, rows: np.ndarray) -> bool:
        """Returns whether the words in these `rows` have the characters of those that begin at `begins`."""
        entries = np.frombuffer(self._words, _WORD).take(rows)
        if not np.array_equal(entries["characters"], sizes):
            return False
        places = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        known = np.frombuffer(self._characters, np.uint32).take(np.repeat(entries["first_character"], sizes) + places)
        return np.array_equal(known, characters.take(np.repeat(begins, sizes) + places))

    def _clear(self) -> None:
        self._factors = np.empty(0, np.uint64)
        self._rows: dict[int, int] = {}  # by hashes
        self._slots = np.zeros(1 << _SLOT_BITS, np.int32)  # rows by the first bits of hashes; row 0 is no word
        self._words, self._characters, self._tokens = bytearray(_WORD.itemsize), bytearray(), bytearray()

    def _factors_of(self, size: int) -> np.ndarray:
        """Returns odd numbers, by which the first `size` characters of a word are multiplied, and some more."""
        if size > len(self._factors):
            more = self._random.integers(0, 1 << 63, max(64, size), np.uint64) * np.uint64(2) + np.uint64(1)
            self._factors = np.append(self._factors, more)
        return self._factors

    def _add(self, words: str, hashes: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> list[int]:
        """Returns the rows of those of `words` with these `hashes` and places. Adds those that are new."""
        keys = hashes.tolist()
        new = []
        for number, key in enumerate(keys):
            if key not in self._rows:
                self._rows[key] = len(self._rows) + 1
                new.append(number)
        if new:
            places = zip(begins[new].tolist(), ends[new].tolist(), strict=True)
            self._store([words[begin:end] for begin, end in places], hashes[new])
        return [self._rows[key] for key in keys]

    def _store(self, entries: Sequence[str], hashes: np.ndarray) -> None:
        """Stores new words, each with its space."""
        tokens = [self._tokens_in(entry[:-1]) for entry in entries]
        rows = np.empty(len(entries), _WORD)
        rows["hash"] = hashes
        rows["characters"] = list(map(len, entries))
        rows["tokens"] = [len(each) // len(_NUMBERS) for each in tokens]
        rows["first_character"] = len(self._characters) // 4 + np.cumsum(rows["characters"]) - rows["characters"]
        rows["first_token"] = len(self._tokens) // _TOKEN.itemsize + np.cumsum(rows["tokens"]) - rows["tokens"]
        slots = _slots_of(hashes)
        free = np.flatnonzero(self._slots[slots] == 0)
        self._slots[slots[free]] = free + len(self._words) // _WORD.itemsize
        self._words += rows.tobytes()
        self._characters += "".join(entries).encode("utf-32-le", "surrogatepass")
        self._tokens += array("i", itertools.chain.from_iterable(tokens)).tobytes()

    def _tokens_in(self, word: str) -> list[int]:
        """Returns the `_NUMBERS` of each token of a word."""
        if word == LINE_END:
            return self._line_end
        ids, starts, stops = self._pieces(word)
        tokens: list[int] = []
        for id, start, stop in zip(ids, starts, stops, strict=True):
            tokens += (id, start, stop, not tokens, 0)
        tokens = tokens or [_NO_ID, 0, 0, 1, 0]
        tokens[-1] = stops[-1] if word.startswith(MARK) else len(word)
        return tokens

    def _tokens_of(self, found: np.ndarray) -> np.ndarray:
        """Returns each `_TOKEN` of the words that were found."""
        counts = found["tokens"]
        places = np.repeat(found["first_token"] - (np.cumsum(counts) - counts), counts)
        places += np.arange(len(places))
        return np.frombuffer(self._tokens, _TOKEN).take(places)


class FoundTokens:
    """The tokens of words, with one or more for each `LINE_END`.

    Attributes:
        ids: (T,), writable.
        line_ends: the places of the tokens of a `LINE_END`.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        self._all = tokens
        is_token = tokens["id"] != _NO_ID
        self._where = slice(None) if is_token.all() else is_token
        self.ids = tokens["id"][self._where].copy()
        self.line_ends = np.flatnonzero(self.ids == _LINE_END_ID)

    def word_starts(self) -> np.ndarray:
        """Returns whether each token is the first one of a word (T,)."""
        return self._all["is_first"][self._where].astype(bool)

    def word_numbers(self) -> np.ndarray:
        """Returns the number of words up to each token, its own included (T,)."""
        return np.cumsum(self._all["is_first"])[self._where]

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each token the number of characters of all words before its first character, and that before the
        character after its last one (T,). A `LINE_END` has none, and its tokens one."""
        characters = self._all["characters"]
        begins = np.cumsum(characters) - characters
        return (begins + self._all["start"])[self._where], (begins + self._all["stop"])[self._where]


def _slots_of(hashes: np.ndarray) -> np.ndarray:
    """Returns the first bits of `hashes`."""
    slots: np.ndarray = (hashes >> np.uint64(64 - _SLOT_BITS)).astype(np.intp)
    return slots
