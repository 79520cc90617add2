"""MeCab's words from the files of MeCab's dictionaries, more than twice as fast as MeCab itself finds them.

`kernels.c` does MeCab's analysis. MeCab's time goes into waiting for memory: a table of 5,981 x 5,981 costs, and nodes
of more than a hundred bytes. Here the rows and columns of the table are ordered by how often a sample of the text needs
them, so that nearly all costs that are looked up stay in the processor's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from terakoya_tokenizer.kernels import address

_FILES = ("sys.dic", "unk.dic", "matrix.bin", "char.bin")
_HEADER = 72
_TOKEN = np.dtype([("left", "<u2"), ("right", "<u2"), ("part", "<u2"), ("cost", "<i2"), ("more", "<u4", 2)])
_WORD = np.dtype([("left", np.uint16), ("right", np.uint16), ("cost", np.int16)])
_BEHIND = 256
"""Units behind a double array, where children of its last nodes would be."""
_CATEGORIES = 0x3FFFF
_LARGEST = 128 << 20
"""Bytes of a table of costs that is copied. A larger one, of a full UniDic, is read where it is, in its own order."""
_CODES = 1 << 16
_WHITE, _ODD = 1, 2
"""Kinds of characters: lines that end with white space, or with an odd character in them, are left to MeCab."""


class _Tables(NamedTuple):
    """The `Tables` of `kernels.c`, where their fields are explained."""

    trie: np.ndarray
    first: np.ndarray
    words: np.ndarray
    connection: np.ndarray
    characters: np.ndarray
    unknown: np.ndarray
    kinds: np.ndarray
    line: np.ndarray
    """Left and right number of the ends of a line."""


class _Pointers(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _Tables._fields[:-1]),
        *((name, ctypes.c_int64) for name in ("rights", "line_left", "line_right")),
    ]


class Lattice:
    """Splits lines into words. It holds 90 MB for unidic-lite, most of it a copy of the table of costs."""

    def __init__(self, kernels: ctypes.CDLL, folder: Path, sample: str) -> None:
        """`folder` is that of a dictionary that `is_readable`; `sample` is some of the text, not empty."""
        self._kernels = kernels
        tables = _read(folder)
        text = np.array([sample]).view(np.uint32)
        found = np.zeros(len(tables.words), np.int64)
        kernels.count_words(ctypes.byref(_pointers(tables)), address(text), len(text), address(found))
        self._tables = _ordered(tables, found) if tables.connection.nbytes <= _LARGEST else tables
        self._work = np.empty(kernels.work_size(), np.uint8)
        self._pointers = _pointers(self._tables)

    def split(self, lines: Sequence[str]) -> list[str | None]:
        """Returns the words of each of `lines`, joined by spaces; None where MeCab may read a line in another way, such
        as one with a NUL, or of more than 16,000 characters."""
        sizes = np.fromiter(map(len, lines), np.int64, len(lines))
        text = np.array(["".join(lines)]).view(np.uint32)
        out, ends = np.empty(2 * len(text), np.uint32), np.empty(len(lines), np.int64)
        arrays = map(address, (self._work, text, sizes))
        self._kernels.split_lines(ctypes.byref(self._pointers), *arrays, len(lines), address(out), address(ends))
        stops = [0, *ends.tolist()]
        words = out[: stops[-1]].tobytes().decode("utf-32-le")
        places = zip(stops[:-1], stops[1:], lines, strict=True)
        return [words[start:stop] if stop > start or not line else None for start, stop, line in places]


def is_readable(folder: Path) -> bool:
    """Returns whether the dictionary in `folder` is in UTF-8 and has the usual files."""
    if not all((folder / name).is_file() for name in _FILES):
        return False
    with (folder / "sys.dic").open("rb") as stream:
        charset = stream.read(_HEADER)[40:].partition(b"\0")[0]
    return charset.lower().replace(b"-", b"").replace(b"_", b"") == b"utf8"


def _pointers(tables: _Tables) -> _Pointers:
    return _Pointers(*map(address, tables[:-1]), tables.connection.shape[1], *tables.line.tolist())


def _read(folder: Path) -> _Tables:
    """Returns the tables of a dictionary with the numbers of its files."""
    trie, words = _without_twins(*_dictionary(folder / "sys.dic"))
    unknown_trie, unknown = _dictionary(folder / "unk.dic")
    matrix = np.memmap(folder / "matrix.bin", "<i2", "r")
    rights, lefts = matrix[:2].view("<u2").tolist()
    properties = np.fromfile(folder / "char.bin", np.uint8)
    count = int(properties[:4].view("<u4")[0])
    names = [bytes(name).partition(b"\0")[0] for name in properties[4 : 4 + 32 * count].reshape(count, 32)]
    characters = np.append(properties[4 + 32 * count :].view("<u4"), np.uint32(0))
    kinds = np.zeros(_CODES, np.uint8)
    kinds[[code for code in range(_CODES) if chr(code).isspace()]] = _WHITE
    kinds[characters & characters[ord(" ")] & _CATEGORIES != 0] = _WHITE
    kinds[[0, *range(0xD800, 0xE000), 0xFFFF]] = _ODD  # MeCab has no table for the last one
    groups = np.array([_exact(unknown_trie, name) for name in names])
    all_words = np.zeros(len(words) + len(unknown) + 1, _WORD)
    for name in _WORD.names or ():
        all_words[name][:-1] = np.append(words[name], unknown[name])
    return _Tables(
        trie=trie,
        first=_first_nodes(trie),
        words=all_words,
        connection=matrix[2:].reshape(lefts, rights),
        characters=characters,
        unknown=np.stack([(groups >> 8) + len(words), groups & 0xFF], 1).astype(np.int32),
        kinds=kinds,
        line=np.zeros(2, np.int64),
    )


def _dictionary(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns the double array of a dictionary (U, 2), of each unit base and check, and its words."""
    data = np.memmap(file, np.uint8, "r")
    size, tokens = data[24:32].view("<u4").tolist()
    units = np.zeros((size // 8 + _BEHIND, 2), np.int32)
    units[:-_BEHIND] = data[_HEADER : _HEADER + size].view("<i4").reshape(-1, 2)
    return units, data[_HEADER + size :][:tokens].view(_TOKEN)


def _without_twins(trie: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a dictionary without each word that costs more than another one with the same characters and numbers, or
    as much and comes later. MeCab never takes it."""
    leaves = np.flatnonzero(trie[:-_BEHIND, 0] < 0)
    values = -trie[leaves, 0].astype(np.int64) - 1  # 256 x the first word + how many
    firsts, counts = values >> 8, values & 0xFF
    surfaces = np.zeros(len(words), np.int64)
    surfaces[firsts] = 1
    surfaces = np.cumsum(surfaces)
    order = np.lexsort((words["cost"], words["right"], words["left"], surfaces))
    keys = np.stack([surfaces, words["left"], words["right"]])[:, order]
    kept = np.ones(len(words), bool)
    kept[order[1:]] = (np.diff(keys) != 0).any(0)
    places = np.append(0, np.cumsum(kept))
    trie[leaves, 0] = -(places[firsts] << 8 | places[firsts + counts] - places[firsts]) - 1
    return trie, words[kept]


def _exact(trie: np.ndarray, key: bytes) -> int:
    """Returns the value of a key in a double array."""
    node = int(trie[0, 0])
    for byte in key:
        node = int(trie[node + byte + 1, 0])
    return -int(trie[node, 0]) - 1


def _first_nodes(trie: np.ndarray) -> np.ndarray:
    """Returns the node of each character up to U+FFFF, -1 where no word begins with it."""
    nodes = np.full(_CODES, -1, np.int32)
    for first, last, width in ((0, 0x80, 1), (0x80, 0x800, 2), (0x800, 0xD800, 3), (0xE000, _CODES, 3)):
        text = "".join(map(chr, range(first, last))).encode()
        found = np.full(last - first, trie[0, 0])
        for byte in np.frombuffer(text, np.uint8).reshape(-1, width).T.astype(np.int64):
            units = trie[np.maximum(found, 0) + byte + 1]
            found = np.where((found >= 0) & (units[:, 1] == found), units[:, 0], -1)
        nodes[first:last] = found
    return nodes


def _ordered(tables: _Tables, found: np.ndarray) -> _Tables:
    """Returns the tables with other left and right numbers: the lower, the more often they were `found` (W,) with the
    words."""
    lefts, left = _order(tables.words["left"], found, tables.connection.shape[0])
    rights, right = _order(tables.words["right"], found, tables.connection.shape[1])
    connection = np.empty(tables.connection.shape, np.int16)
    for row, number in zip(connection, lefts.tolist(), strict=True):
        np.take(tables.connection[number], rights, out=row)
    words = tables.words.copy()
    words["left"], words["right"] = left[words["left"]], right[words["right"]]
    line = np.array([left[tables.line[0]], right[tables.line[1]]], np.int64)
    return tables._replace(words=words, connection=connection, line=line)


def _order(numbers: np.ndarray, found: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `count` numbers, those that were found most often first, and the new number of each."""
    order = np.argsort(-np.bincount(numbers, found, count), kind="stable")
    places = np.empty(count, np.uint16)
    places[order] = np.arange(count)
    return order, places
