"""The documents of rows are found and named, in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_store import FIRST, small_store
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from terakoya.components.vocabulary import Vocabulary
from terakoya.rows.loader import Loader
from terakoya.rows.named_documents import _tokenizer, describe_documents, documents_by_store
from terakoya.rows.row_source import Layout, RowSource
from terakoya.store.writer import write_store

LENGTH = 16


@pytest.mark.parametrize(
    ("kind", "framing"),
    [("packed", "encoder"), ("stream", "encoder"), ("lines", "encoder"), ("pairs", "encoder"), ("packed", "causal"),
     ("stream", "causal")],
)  # fmt: skip
@pytest.mark.parametrize("eos", [None, 9])
def test_the_documents_of_rows_are_those_of_their_tokens(
    kind: str, framing: str, eos: int | None, tmp_path: Path
) -> None:
    lines = [[(5 * d + 3 * n) % 20 + 1 for n in range(d % 4 + 1)] for d in range(30)]
    store = small_store(tmp_path, lines, eos=eos)
    source = RowSource(store, Layout(kind, framing=framing), sequence_length=LENGTH, seed=7)  # type: ignore[arg-type]
    ends = np.cumsum([sum(document) for document in lines]) + FIRST
    for epoch, positions in ((0, np.arange(5)), (1, np.array([len(source) - 1, 0])), (2, np.array([3]))):
        tokens = source.load(epoch, positions).tokens
        expected = np.unique(np.searchsorted(ends, tokens[tokens >= FIRST], side="right"))
        assert source.documents(epoch, positions).tolist() == expected.tolist()


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "寺子", "##屋", "で", "学", "##ぶ"]
VOCABULARY = Vocabulary(size=len(PIECES), pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))


def test_documents_are_named_by_their_first_words(tmp_path: Path) -> None:
    written = write_store(tmp_path / "s", [[[5, 6, 7, 8, 9]], [[7, 8] * 10]] * 10, vocabulary=VOCABULARY)
    sources = [RowSource(written, Layout("packed"), sequence_length=32, seed=1, store_id=0)]
    ((found, numbers),) = documents_by_store(Loader(sources, [1]), 0, len(sources[0]))
    assert found is written and numbers.tolist() == list(range(20))
    assert describe_documents([(written, numbers)]) == f"documents 0, 1, 2 and 17 more of {written.folder}"
    _tokenizer.cache_clear()
    backend = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(written.tokenizer_folder)
    first, second = '0 ("寺子屋 で 学ぶ")', '1 ("で 学 で 学 で 学 で 学 で 学 で 学 で 学 で 学...")'
    named = describe_documents([(written, numbers[:2]), (written, numbers[:1])])
    assert named == f"documents {first}, {second} of {written.folder}; document {first} of {written.folder}"
