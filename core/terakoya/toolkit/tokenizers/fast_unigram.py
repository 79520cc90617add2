"""Unigram models by `unigram.c`: those whose normalizer only replaces texts, such as LLM-jp's."""

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

UNKNOWN_PENALTY = 10.0
"""How much less an unknown character scores than the least probable piece, in `tokenizers` and SentencePiece."""
_NODE, _STEP = 24, 16
"""Bytes of a `Node` and of a `Step` of `unigram.c`."""


@functools.cache
def unigram_kernels() -> ctypes.CDLL | None:
    """Returns the functions of `unigram.c`; None where they cannot be compiled."""
    kernels = load_library(Path(__file__).with_name("unigram.c"))
    if kernels is not None:
        number, array = ctypes.c_int64, ctypes.c_void_p
        kernels.add_pieces.argtypes = (array, number, array, array, array, number)
        kernels.find_pieces.argtypes = (
            array, number, ctypes.c_double, number, ctypes.c_int32, array, array, array, number, array, array, array,
        )  # fmt: skip
    return kernels


class Unigram:
    """The pieces of a unigram model, and the search for the most probable ones of a text."""

    def __init__(
        self, pieces: Sequence[str], scores: np.ndarray, *, unknown: tuple[int, float], in_bytes: Sequence[int] | None,
        rounds: bool = False,
    ) -> None:  # fmt: skip
        """`pieces` by id, empty where no text has one, and their `scores` (V,) float64. A character without a piece is
        `in_bytes`, or the id that is `unknown`, and costs its score. `rounds`: sums are rounded to float32."""
        kernels = unigram_kernels()
        assert kernels is not None, "it is compiled"
        self._find = kernels.find_pieces
        self._unknown, self._score, self._rounds = *unknown, rounds
        self._bytes = np.array(in_bytes or [-1] * 256, np.int32)
        text, sizes = in_characters(pieces)
        self._bits = max(4, (2 * len(text)).bit_length())
        self._table = np.zeros(_NODE << self._bits, np.uint8)
        kernels.add_pieces(
            address(self._table), self._bits, address(text), address(sizes), address(scores), len(pieces)
        )

    def find(self, text: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        """Returns the ids of each text; `text` (C,) uint32 has the characters of all, `sizes` (N,) how many each
        has."""
        steps = np.empty(_STEP * (int(sizes.max(initial=0)) + 1), np.uint8)
        out, counts = np.empty(4 * len(text), np.int32), np.empty(len(sizes), np.int64)
        self._find(
            address(self._table), self._bits, self._score, self._rounds, self._unknown, address(self._bytes),
            address(text), address(sizes), len(sizes), address(steps), address(out), address(counts),
        )  # fmt: skip
        return [out[start:stop] for start, stop in itertools.pairwise(itertools.accumulate(counts.tolist(), initial=0))]


class FastUnigram(NativeEncoder):
    """A unigram tokenizer whose steps before the model replace texts by others."""

    name = "unigram.c"

    @classmethod
    def of(cls, backend: Any, *, split: bool) -> Self | None:
        return None if unigram_kernels() is None else cls(backend, json.loads(backend.to_str()), split=split)

    def __init__(self, backend: Any, content: Mapping[str, Any], *, split: bool) -> None:
        """Raises NotImplementedError for a tokenizer that it does not read."""
        super().__init__(backend, content, split=split)
        model, steps = content["model"], content["pre_tokenizer"]
        pieces = [piece for piece, _ in model["vocab"]]
        scores = np.array([score for _, score in model["vocab"]], np.float64)
        ids = {piece: number for number, piece in enumerate(pieces)}
        in_bytes = [ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)] if model.get("byte_fallback") else None
        if steps is not None or model["unk_id"] is None or (in_bytes and min(in_bytes) < 0):
            raise NotImplementedError("a pre-tokenizer, no unknown piece, or not all bytes")
        unknown = model["unk_id"], float(scores.min()) - UNKNOWN_PENALTY
        self._pieces = Unigram(pieces, scores, unknown=unknown, in_bytes=in_bytes)

    def find(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._pieces.find(*in_characters(texts))


def in_characters(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the characters (C,) of all texts, and how many each has (N,)."""
    joined = "".join(texts)
    return np.frombuffer(joined.encode("utf-32-le"), np.uint32), np.fromiter(map(len, texts), np.int64, len(texts))
