"""Word starts are read from pieces only where the tokenizer's own encoder always agrees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from terakoya.components import EncodedDocuments, Tokenizer
from terakoya.components.vocabulary import Vocabulary
from terakoya_megatron.word_start_marks import word_start_table


class Marked(Tokenizer):
    """A tokenizer with two pieces a word and a kind of mark."""

    pieces: tuple[str, ...]
    starts: tuple[bool, ...] | None = None

    def encoder(self, folder: Path) -> Any:
        """The whole text is piece 1 and piece 2, again and again."""
        starts = None if self.starts is None else np.array(self.starts)

        def encode(documents: Sequence[str]) -> EncodedDocuments:
            return EncodedDocuments(np.array([1, 2, 1, 2]), np.array([4]), np.array([1]), starts)

        return SimpleNamespace(vocabulary=Vocabulary(size=4, special=(0,)), encode=encode)

    def load(self, folder: Path) -> Any:
        """A tokenizer that knows its pieces."""
        return SimpleNamespace(get_vocab=lambda: {piece: number for number, piece in enumerate(self.pieces)})


ALTERNATE = (True, False, True, False)


@pytest.mark.parametrize(
    "pieces", [("<s>", "読み", "##書き", "##も"), ("<s>", "▁読み", "書き", "も"), ("<s>", "Ġ読み", "書き", "も")]
)
def test_marks_that_agree_are_used(pieces: tuple[str, ...]) -> None:
    table = word_start_table(Marked(pieces=pieces, starts=ALTERNATE), Path())
    assert table is not None and table.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("pieces", "starts"),
    [
        (("<s>", "読み", "##書き", "##も"), (True, False, True, True)),
        (("<s>", "読み", "##書き", "##も"), (True, True, True, True)),
        (("<s>", "読み", "##書き", "##も"), None),
        (("<s>", "読み", "書き", "も"), ALTERNATE),
    ],
)
def test_other_marks_are_not_used(pieces: tuple[str, ...], starts: tuple[bool, ...] | None) -> None:
    assert word_start_table(Marked(pieces=pieces, starts=starts), Path()) is None
