"""Which characters of a line each token of the `tokenizers` library stands for.

The library's own offsets take nearly as long as the ids. For byte-level BPE they are not needed: its tokens are the
text's bytes, in order.

Letters: T tokens of all lines, V pieces.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

SpanRows = tuple[list[list[int]], np.ndarray]
"""The ids of each line, and the spans (T, 2) of all of them in their lines."""


def library_spans(encodings: Sequence[Any]) -> SpanRows:
    """Returns the ids of `tokenizers.Encoding`s, and their offsets."""
    offsets = itertools.chain.from_iterable(itertools.chain.from_iterable(each.offsets for each in encodings))
    return [each.ids for each in encodings], np.fromiter(offsets, np.int64).reshape(-1, 2)


class ByteSpans:
    """Finds spans of tokens that are the bytes of a line. It belongs to one backend of a byte-level BPE."""

    def __init__(self, backend: Any) -> None:
        """`backend` is the tokenizer of the library; `is_for` must be true of it."""
        self._backend = backend
        self._prefix = any(each.get("add_prefix_space") for each in _steps(backend))

    @staticmethod
    def is_for(backend: Any) -> bool:
        """Returns whether each piece of `backend` stands for its own bytes, and no step removes text."""
        from tokenizers import pre_tokenizers

        model, steps = backend.model, _steps(backend)
        return (
            type(model).__name__ == "BPE"
            and not (model.continuing_subword_prefix or model.end_of_word_suffix)
            and [step["type"] for step in steps].count("ByteLevel") == 1
            and all(step["type"] in ("ByteLevel", "Digits", "Split") for step in steps)
            and all(step.get("behavior") != "Removed" for step in steps)
            and (len(steps) == 1 or not any(step.get("add_prefix_space") for step in steps))  # one for each split
            and set(pre_tokenizers.ByteLevel.alphabet()) <= backend.get_vocab(with_added_tokens=False).keys()
        )

    @cached_property
    def _lengths(self) -> np.ndarray:
        """The bytes of each piece (V,); those of an added token are its text's."""
        pieces = self._backend.get_vocab(with_added_tokens=True)
        lengths = np.zeros(max(pieces.values(), default=-1) + 1, np.int64)
        for piece, id in pieces.items():
            lengths[id] = len(piece)  # a character stands for a byte
        for id, token in self._backend.get_added_tokens_decoder().items():
            lengths[id] = len(token.content.encode())
        return lengths

    @cached_property
    def _added(self) -> np.ndarray:
        """Whether each piece is an added token (V,)."""
        added = np.zeros(len(self._lengths), bool)
        added[list(self._backend.get_added_tokens_decoder())] = True
        return added

    def find(
        self, lines: Sequence[str], rows: Sequence[Sequence[int]], slow: Callable[[str], np.ndarray]
    ) -> np.ndarray:
        """Returns the spans (T, 2) of `rows`, the ids of `lines`. `slow` returns those of one line, for lines that were
        changed before they became bytes."""
        spans = []
        for line, row in zip(lines, rows, strict=True):
            ids = np.array(row, np.int64)
            stops = np.cumsum(self._lengths[ids])
            data = np.frombuffer(line.encode(), np.uint8)
            surplus = int(stops[-1]) - len(data) if len(row) else -len(data)
            if surplus == 1 and self._prefix and not self._added[ids].any():  # the space that begins the line
                stops, surplus = stops - 1, 0
            if surplus or not self._is_unchanged(line):
                spans.append(slow(line))
                continue
            if not len(data):
                spans.append(np.zeros((len(row), 2), np.int64))
                continue
            characters = np.cumsum((data & 0xC0) != 0x80)  # the number of the character, from 1, of each byte
            starts = np.concatenate([[0], stops[:-1]])
            first = characters[np.minimum(starts, len(data) - 1)] - 1
            spans.append(np.stack([first, characters[np.maximum(stops, 1) - 1]], axis=1))
        return np.concatenate([np.empty((0, 2), np.int64), *spans])

    def _is_unchanged(self, line: str) -> bool:
        normalizer = self._backend.normalizer
        return normalizer is None or normalizer.normalize_str(line) == line


def _steps(backend: Any) -> list[dict[str, Any]]:
    """Returns the pre-tokenizers of `backend`, in order."""
    if backend.pre_tokenizer is None:
        return []
    step: dict[str, Any] = json.loads(backend.pre_tokenizer.__getstate__())
    return list(step["pretokenizers"]) if step["type"] == "Sequence" else [step]
