"""Unigram models by `unigram.c`: those whose normalizer only replaces texts, such as LLM-jp's."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from terakoya.toolkit.tokenizers.fast_encoder import FastEncoder
from terakoya_tokenizer.kernels import address, load_library

_BEGIN = ("(?<!\\n)^", "^(?<!\\n)", "\\A")
"""Regular expressions for the beginning of a text."""
_UNKNOWN_PENALTY = 10.0
"""How much less an unknown character scores than the least probable piece, in `tokenizers` and SentencePiece."""
_NODE, _STEP = 24, 16
"""Bytes of a `Node` and of a `Step` of `unigram.c`."""


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    kernels = load_library(Path(__file__).with_name("unigram.c"))
    if kernels is not None:
        number, array = ctypes.c_int64, ctypes.c_void_p
        kernels.add_pieces.argtypes = (array, number, array, array, array, number)
        kernels.find_pieces.argtypes = (
            array, number, ctypes.c_double, ctypes.c_int32, array, array, array, number, array, array, array,
        )  # fmt: skip
    return kernels


class FastUnigram(FastEncoder):
    """A unigram tokenizer whose steps before the model replace texts by others."""

    name = "unigram.c"
    without = "export CC=none"

    @classmethod
    def of(cls, backend: Any, *, split: bool) -> Self | None:
        """See `FastEncoder`."""
        if _kernels() is None:
            return None
        content = json.loads(backend.to_str())
        if content["pre_tokenizer"] is not None:
            raise NotImplementedError(f"the pre-tokenizer {content['pre_tokenizer']['type']}")
        return cls(backend, content, split=split)

    def __init__(self, backend: Any, content: Mapping[str, Any], *, split: bool) -> None:
        super().__init__(backend, split=split)
        model, kernels = content["model"], _kernels()
        assert kernels is not None, "it is compiled"
        self._find = kernels.find_pieces
        self._replace = [*_replacements(content["normalizer"])]
        whole = [each["content"] for each in content["added_tokens"] if not (split and each["special"])]
        self._added = re.compile("|".join(map(re.escape, whole)) or "(?!)")
        pieces = [piece for piece, _ in model["vocab"]]
        scores = np.array([score for _, score in model["vocab"]], np.float64)
        ids = {piece: number for number, piece in enumerate(pieces)}
        in_bytes = [ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        if model["unk_id"] is None or (model.get("byte_fallback") and min(in_bytes) < 0):
            raise NotImplementedError("no unknown piece, or not all bytes")
        self._unknown, self._unknown_score = model["unk_id"], float(scores.min()) - _UNKNOWN_PENALTY
        self._bytes = np.array(in_bytes if model.get("byte_fallback") else [-1] * 256, np.int32)
        text, sizes = _characters(pieces)
        self._bits = max(4, (2 * len(text)).bit_length())
        self._table = np.zeros(_NODE << self._bits, np.uint8)
        kernels.add_pieces(
            address(self._table), self._bits, address(text), address(sizes), address(scores), len(pieces)
        )

    def rows(self, lines: Sequence[str]) -> list[np.ndarray]:
        """See `FastEncoder`. Lines with added tokens are left to `tokenizers`."""
        others = [number for number, line in enumerate(lines) if self._added.search(line)]
        own = list(lines)
        for number in others:
            own[number] = ""
        for replace in self._replace:
            own = [replace(line) for line in own]
        text, sizes = _characters(own)
        steps = np.empty(_STEP * (int(sizes.max(initial=0)) + 1), np.uint8)
        out, counts = np.empty(4 * len(text), np.int32), np.empty(len(own), np.int64)
        self._find(
            address(self._table), self._bits, self._unknown_score, self._unknown, address(self._bytes), address(text),
            address(sizes), len(own), address(steps), address(out), address(counts),
        )  # fmt: skip
        stops = itertools.accumulate(counts.tolist(), initial=0)
        rows = [out[start:stop] for start, stop in itertools.pairwise(stops)]
        if others:
            self.backend.encode_special_tokens = self.split
            encoded = self.backend.encode_batch_fast([lines[number] for number in others], add_special_tokens=False)
            for number, each in zip(others, encoded, strict=True):
                rows[number] = np.array(each.ids, np.int32)
        return rows


def _characters(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the characters (C,) of all texts, and how many each has (N,)."""
    joined = "".join(texts)
    return np.frombuffer(joined.encode("utf-32-le"), np.uint32), np.fromiter(map(len, texts), np.int64, len(texts))


def _replacements(normalizer: Mapping[str, Any] | None) -> Sequence[Callable[[str], str]]:
    """Returns what a normalizer of `tokenizers` does with a text, step by step. Raises NotImplementedError if that is
    more than to replace texts."""
    if normalizer is None:
        return []
    if normalizer["type"] == "Sequence":
        return [*itertools.chain.from_iterable(map(_replacements, normalizer["normalizers"]))]
    if normalizer["type"] == "Prepend":
        return [lambda text: normalizer["prepend"] + text if text else text]
    if normalizer["type"] != "Replace":
        raise NotImplementedError(f"the normalizer {normalizer['type']}")
    (kind, pattern), new = next(iter(normalizer["pattern"].items())), normalizer["content"]
    if kind == "Regex" and pattern in _BEGIN:
        return [lambda text: new + text if text else text]
    if kind == "Regex" and re.escape(pattern).replace("\\ ", " ") != pattern:
        raise NotImplementedError(f"the regular expression {pattern}")
    return [lambda text: text.replace(pattern, new)]
