"""BPE of characters, as SentencePiece's, by `merges.c`."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from terakoya.toolkit.tokenizers.native_encoder import NativeEncoder
from terakoya_tokenizer.kernels import address, load_library

_MERGE, _PIECE = 16, 16
"""Bytes of a `Merge` and a `Piece` of `merges.c`."""


@functools.cache
def merge_kernels() -> ctypes.CDLL | None:
    """Returns the functions of `merges.c`; None where this machine cannot make them."""
    kernels = load_library(Path(__file__).with_name("merges.c"))
    if kernels is not None:
        number, array = ctypes.c_int64, ctypes.c_void_p
        kernels.build.argtypes, kernels.build.restype = (array, array, number, array), number
        kernels.find_pieces.argtypes = (array, ctypes.c_int32, array, array, array, number, array, array, array)
    return kernels


class Merges:
    """A vocabulary that merges make."""

    def __init__(
        self, pieces: Sequence[str], ids: Mapping[str, int], merges: Sequence[tuple[int, int, int, int]], *,
        unknown: int, in_bytes: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """`pieces` by id, empty where no text has one, and the `ids` of those of one character; `merges` are left,
        right and merged id and a rank, the lowest first. A character without a piece is `in_bytes`, or `unknown`.
        Raises NotImplementedError if the tables do not have room."""
        kernels = merge_kernels()
        assert kernels is not None, "the caller has looked"
        self._find = kernels.find_pieces
        self._unknown, self._bytes = unknown, np.array(in_bytes or [-1] * 256, np.int32)
        texts = [piece.encode() for piece in pieces]
        sizes = [*map(len, texts)]
        nodes, bits = min(1 << 22, 2 * sum(sizes) + (1 << 16)), max(4, (2 * len(merges)).bit_length())
        order = np.array(sorted(range(len(texts)), key=texts.__getitem__), np.int32)
        rows = np.array(merges, np.int32).reshape(-1, 4)
        self._arrays: list[np.ndarray] = [
            np.zeros(nodes, np.uint32),
            np.zeros(nodes, np.int32),
            np.zeros(nodes, np.uint8),
            np.zeros(_MERGE << bits, np.uint8),
            np.zeros(1 << bits, np.uint8),
            np.zeros(len(pieces) * _PIECE, np.uint8),
            np.zeros(len(pieces), np.int32),
            np.zeros(len(pieces), np.uint8),
            np.array([ids.get(one, -1) for one in "".join(pieces)], np.int32),
            np.cumsum([0, *map(len, pieces)]),
            np.frombuffer(b"".join(texts) + b"\0", np.uint8),
            np.cumsum([0, *sizes]),
        ]
        self._model = np.array([*map(address, self._arrays), nodes, bits, len(pieces), 0], np.int64)
        if not kernels.build(address(self._model), address(rows), len(rows), address(order)):
            raise NotImplementedError("the vocabulary is too large")

    def find(self, text: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        """Returns the ids of each text; `text` (B,) uint8 has the bytes of all, `sizes` (N,) how many each has."""
        dead = np.zeros(int(sizes.max(initial=0)) + 1, np.uint8)
        out, counts = np.empty(len(text), np.int32), np.empty(len(sizes), np.int64)
        self._find(
            address(self._model), self._unknown, address(self._bytes), address(text), address(sizes), len(sizes),
            address(dead), address(out), address(counts),
        )  # fmt: skip
        return [out[start:stop] for start, stop in itertools.pairwise(itertools.accumulate(counts.tolist(), initial=0))]


def in_utf8(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes (B,) of all texts, and how many each has (N,)."""
    every = [text.encode() for text in texts]
    return np.frombuffer(b"".join(every), np.uint8), np.fromiter(map(len, every), np.int64, len(every))


class NativeBpe(NativeEncoder):
    """A BPE tokenizer of characters, as those that are made of SentencePiece's models."""

    name = "merges.c"

    @classmethod
    def of(cls, backend: Any, *, split: bool) -> Self | None:
        return None if merge_kernels() is None else cls(backend, json.loads(backend.to_str()), split=split)

    def __init__(self, backend: Any, content: Mapping[str, Any], *, split: bool) -> None:
        """Raises NotImplementedError for a tokenizer that it does not read."""
        super().__init__(backend, content, split=split)
        model = content["model"]
        if content["pre_tokenizer"] is not None or any(
            model[name] for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        ):
            raise NotImplementedError("a pre-tokenizer, or pieces that are found otherwise")
        ids: dict[str, int] = model["vocab"]
        names = {number: piece for piece, number in ids.items()}
        pieces = [names.get(number, "") for number in range(max(names, default=-1) + 1)]
        in_bytes = [ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)] if model["byte_fallback"] else None
        unknown = ids.get(model["unk_token"], -1)
        merges = [(ids[one], ids[two], ids[one + two], rank) for rank, (one, two) in enumerate(model["merges"])]
        if min(in_bytes) < 0 if in_bytes else unknown < 0 or not model["fuse_unk"]:
            raise NotImplementedError("unknown characters without a piece")
        if not {unknown, *(in_bytes or ())}.isdisjoint(one for pair in merges for one in pair[:2]):
            raise NotImplementedError("merges of unknown characters")
        self._merges = Merges(pieces, ids, merges, unknown=unknown, in_bytes=in_bytes)

    def find(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._merges.find(*in_utf8(texts))
