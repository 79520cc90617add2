"""BPE by the library fastokens (https://github.com/crusoecloud/fastokens)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from terakoya.toolkit.attributes import replace_variables
from terakoya.toolkit.tokenizers.fast_encoder import FastEncoder

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_THREADS = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
"""How many threads the library makes, when it first encodes: one, as every process of `prepare` has its own."""


class FastBpe(FastEncoder):
    """A BPE tokenizer that fastokens reads."""

    name = "fastokens"
    without = "pip uninstall fastokens"
    _fast: Any

    @classmethod
    def of(cls, backend: Any, *, split: bool) -> Self | None:
        try:
            import fastokens
        except ImportError:
            return None
        added = backend.get_added_tokens_decoder().values()
        if any(getattr(token, flag) for token in added for flag in _FLAGS):
            return None
        encoder = cls(backend, split=split)
        with replace_variables(dict.fromkeys(_THREADS, "1")):
            encoder._fast = fastokens.Tokenizer.from_json_str(backend.to_str())
            encoder.rows(["a"])
        return encoder

    def rows(self, lines: Sequence[str]) -> list[np.ndarray]:
        ids, ends = self._fast.encode_batch_flat(list(lines), split_special_tokens=self.split)
        flat, stops = np.frombuffer(ids, np.uint32), np.frombuffer(ends, np.uint64).tolist()
        return [flat[start:stop] for start, stop in itertools.pairwise(stops)]
