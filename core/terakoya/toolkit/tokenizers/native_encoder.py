"""What the encoders in C share: added tokens are cut out of texts, and what is between them is normalised."""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terakoya.toolkit.tokenizers.fast_encoder import FastEncoder

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_BEGIN = ("(?<!\\n)^", "^(?<!\\n)", "\\A")
"""Regular expressions for the beginning of a text."""


class NativeEncoder(FastEncoder):
    """A tokenizer whose model is read by a C file."""

    without = "export CC=none"

    def __init__(self, backend: Any, content: Mapping[str, Any], *, split: bool) -> None:
        """`content` is that of the tokenizer.json, from which the normalizer is taken."""
        super().__init__(backend, split=split)
        self._replace = [*replacements(content["normalizer"])]
        whole = [each for each in content["added_tokens"] if not (split and each["special"])]
        odd = [each["content"] for each in whole if any(each[flag] for flag in _FLAGS)]
        self._odd = re.compile("|".join(map(re.escape, odd)) or "(?!)")
        self._ids = {each["content"]: np.array([each["id"]], np.int32) for each in whole}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @abstractmethod
    def find(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each of `texts`, which have no added token. Raises ValueError if one cannot be encoded."""

    def rows(self, lines: Sequence[str]) -> list[np.ndarray]:
        """See `FastEncoder`. Lines with added tokens that take characters around them are left to `tokenizers`."""
        others = [number for number, line in enumerate(lines) if self._odd.search(line)]
        own = list(lines)
        for number in others:
            own[number] = ""
        parts = [*map(self._added.split, own)]
        texts = [text for each in parts for text in each[::2]]
        for replace in self._replace:
            texts = [*map(replace, texts)]
        rows = self.find(texts)
        if len(rows) > len(lines):
            rest = iter(rows)
            rows = [
                np.concatenate([next(rest), *itertools.chain(*((self._ids[one], next(rest)) for one in each[1::2]))])
                for each in parts
            ]
        if others:
            for number, ids in zip(others, self.library_ids([lines[number] for number in others]), strict=True):
                rows[number] = np.array(ids, np.int32)
        return rows


def replacements(normalizer: Mapping[str, Any] | None) -> Sequence[Callable[[str], str]]:
    """Returns what a normalizer of `tokenizers` does with a text, step by step. Raises NotImplementedError if that is
    more than to replace texts."""
    if normalizer is None:
        return []
    if normalizer["type"] == "Sequence":
        return [*itertools.chain.from_iterable(map(replacements, normalizer["normalizers"]))]
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
