"""SentencePiece models by functions in C: `normalise.c`, and the search of the core for BPE and unigram models."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from terakoya.toolkit.tokenizers.fast_encoder import FastEncoder
from terakoya.toolkit.tokenizers.fast_unigram import UNKNOWN_PENALTY, Unigram, unigram_kernels
from terakoya.toolkit.tokenizers.find_encoder import has_equal_ids, odd_texts
from terakoya.toolkit.tokenizers.merges import Merges, in_utf8, merge_kernels
from terakoya_tokenizer.kernels import address, load_library

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_LONG = 700
"""So many texts, one after the other, have a sum of scores that SentencePiece rounds."""


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    kernels = load_library(Path(__file__).with_name("normalise.c"))
    if kernels is not None:
        number, array = ctypes.c_int64, ctypes.c_void_p
        kernels.find_begins.argtypes = (array, array)
        kernels.normalise.argtypes = (
            array, array, array, number, number, number, array, array, number, array, number, array,
        )  # fmt: skip
        kernels.normalise.restype = number
    return kernels


class NativeModel(FastEncoder):
    """A unigram or BPE model of SentencePiece without user-defined and unused pieces."""

    name = "normalise.c"
    without = "export CC=none"
    library = "SentencePiece"

    @classmethod
    def of(cls, backend: SentencePieceProcessor, *, split: bool = True) -> Self | None:
        every = (_kernels(), merge_kernels(), unigram_kernels())
        return None if None in every else cls(backend, split=split)

    def __init__(self, backend: SentencePieceProcessor, *, split: bool) -> None:
        """Raises NotImplementedError for a model that it does not read."""
        from sentencepiece import sentencepiece_model_pb2

        super().__init__(backend, split=split)
        proto = sentencepiece_model_pb2.ModelProto.FromString(backend.serialized_model_proto())
        spec, rules = proto.trainer_spec, proto.normalizer_spec
        kind = proto.SentencePiece
        self._wide = spec.model_type == spec.UNIGRAM
        if spec.model_type not in (spec.UNIGRAM, spec.BPE) or {kind.UNUSED, kind.USER_DEFINED} & {
            piece.type for piece in proto.pieces
        }:
            raise NotImplementedError("other kinds of models or pieces")
        if spec.treat_whitespace_as_suffix or not rules.escape_whitespaces:
            raise NotImplementedError("spaces that are marked otherwise")
        self._flags = rules.add_dummy_prefix, rules.remove_extra_whitespaces, self._wide
        charsmap = rules.precompiled_charsmap
        size = int.from_bytes(charsmap[:4], "little")
        self._rules = np.frombuffer(charsmap[4 : 4 + size].ljust(4, b"\0"), np.uint32)
        self._targets = np.frombuffer(charsmap[4 + size :] + b"\0", np.uint8)
        self._begins = np.zeros(0x110000 // 8, np.uint8)
        kernels = _kernels()
        assert kernels is not None, "it is compiled"
        self._normalise = kernels.normalise
        if charsmap:
            kernels.find_begins(address(self._rules), address(self._begins))
        pieces = [piece.piece if piece.type == kind.NORMAL else "" for piece in proto.pieces]
        ids = {piece: number for number, piece in enumerate(pieces) if piece}
        in_bytes = [backend.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)] if spec.byte_fallback else None
        scores = np.array([piece.score for piece in proto.pieces], np.float64)
        lowest = min((piece.score for piece in proto.pieces if piece.type == kind.NORMAL), default=0.0)
        if self._wide:
            unknown = backend.unk_id(), float(np.float32(lowest) - np.float32(UNKNOWN_PENALTY))
            self._pieces: Any = Unigram(pieces, scores, unknown=unknown, in_bytes=in_bytes, rounds=True)
            return
        if any(piece not in ids for piece in set("".join(pieces))) or any(
            len(piece.piece) == 1 and piece.type != kind.NORMAL for piece in proto.pieces
        ):
            raise NotImplementedError("pieces of unknown characters")
        ranks = np.unique(-scores, return_inverse=True)[1].tolist()
        merges = [
            (left, right, number, ranks[number])
            for whole, number in ids.items()
            for cut in range(1, len(whole))
            if (left := ids.get(whole[:cut])) is not None and (right := ids.get(whole[cut:])) is not None
        ]
        self._pieces = Merges(pieces, ids, merges, unknown=backend.unk_id(), in_bytes=in_bytes)

    def rows(self, lines: Sequence[str]) -> list[np.ndarray]:
        text, sizes = in_utf8(lines)
        counts = np.empty(len(sizes), np.int64)
        room, done = 2 * len(text) + 64, 0
        while not done:
            room *= 2
            out = np.empty(room, np.uint8)
            done = self._normalise(
                address(self._rules), address(self._targets), address(self._begins), *self._flags, address(text),
                address(sizes), len(sizes), address(out), room, address(counts),
            )  # fmt: skip
        total = int(counts.sum())
        return self._pieces.find(out.view(np.uint32)[:total] if self._wide else out[:total], counts)

    def library_ids(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self.backend.encode(list(texts), num_threads=1)
        return ids


def find_native_model(processor: SentencePieceProcessor) -> FastEncoder | None:
    """Returns an encoder for `processor`, that of a model; None where there is none, or where it has other ids for one
    of some thousand texts, which it says."""
    try:
        model = NativeModel.of(processor)
    except NotImplementedError:
        return None
    texts = odd_texts(len(processor), processor.decode)
    texts.append("".join(texts[:_LONG]))
    return model if model is not None and has_equal_ids(model, texts) else None
