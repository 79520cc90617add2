"""A toy vocabulary, tokenizer and store, and toy sizes, with which a check of a component takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from terakoya.components import Component
from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore, Unit
from terakoya.store.writer import write_store

SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "[BOS]", "[EOS]", *(f"[unused{n}]" for n in range(8)))
PAD = 3
"""Not 0, so that the checks detect a config that leaves the id at its default."""
VOCABULARY = Vocabulary(size=64, pad=PAD, unk=0, cls=1, sep=2, mask=4, bos=5, eos=6, special=tuple(range(len(SPECIAL))))
SEQUENCE_LENGTH = 32

SIZES: Mapping[str, Any] = {
    "hidden_size": 16, "d_model": 16, "embedding_size": 16, "intermediate_size": 32, "d_ff": 32, "d_inner": 32,
    "d_kv": 4, "num_hidden_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4,
    "num_heads": 4, "n_head": 4, "max_position_embeddings": 48, "vocab_size": 200,
}  # fmt: skip
"""Transformers' usual names of sizes. A head is 4 wide, and a quarter of every width is a whole number."""


def settings(component: type[Component], **further: Any) -> Component:
    """An instance at toy size: the small SIZES, overridden by the component's `test_settings`, overridden by
    `further`."""
    return component.model_validate(values(component) | further)


def values(component: type[Component]) -> dict[str, Any]:
    """The JSON keys and values of `settings` without `further`."""
    small = {name: value for name, value in SIZES.items() if name in component.model_fields}
    return {**small, **component.test_settings}


def make_tokenizer(folder: Path) -> Path:
    """Saves a Transformers tokenizer that splits at spaces, with the words of `VOCABULARY`, into `folder`."""
    from tokenizers.models import WordLevel

    words = [*SPECIAL, *(f"w{n}" for n in range(VOCABULARY.size - len(SPECIAL)))]
    names = ("unk", "cls", "sep", "pad", "mask", "bos", "eos")
    return _save_tokenizer(folder, WordLevel, words, dict(zip(names, SPECIAL, strict=False)))


def make_wordpiece(folder: Path, words: Sequence[str]) -> Path:
    """Saves a Transformers tokenizer with WordPiece over words between spaces into `folder`; the id of each of `words`
    is its place. Those in brackets are special."""
    from tokenizers.models import WordPiece

    special = {word.strip("[]").lower(): word for word in words if word.startswith("[")}
    return _save_tokenizer(folder, WordPiece, words, special)


def _save_tokenizer(folder: Path, model: Any, words: Sequence[str], special: Mapping[str, str]) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(model({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    roles = {f"{name}_token": word for name, word in special.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)
    return folder


def make_store(
    folder: Path, *, unit: Unit = "document", documents: int = 48, conversations: bool = False
) -> TokenStore:
    """Writes a store of lines in which each token predicts the next well, with its tokenizer, into the new `folder`.
    With `conversations` every second line is an answer."""
    generator = np.random.default_rng(5)
    first, span = VOCABULARY.special[-1] + 1, VOCABULARY.size - len(VOCABULARY.special)
    texts = []
    for _ in range(documents):
        lines = []
        for _ in range(generator.integers(2, 5)):
            ids = [int(generator.integers(span))]
            while len(ids) < generator.integers(4, 12):
                ids.append((3 * ids[-1] + 7) % span)
            lines.append([first + each for each in ids])
        texts.append(lines)
    return write_store(
        folder / "store",
        texts,
        vocabulary=VOCABULARY,
        unit=unit,
        word_starts=[[[True] * len(line) for line in lines] for lines in texts],
        answers=[[[n % 2 == 1] * len(line) for n, line in enumerate(lines)] for lines in texts]
        if conversations
        else None,
        tokenizer_folder=make_tokenizer(folder / "tokenizer"),
    )


def make_store_for(layout: Layout, folder: Path) -> TokenStore:
    """Writes a store that `layout` can use into the new `folder`."""
    return make_store(folder, unit=store_unit(layout), conversations=layout.whole is not None)


def store_unit(layout: Layout) -> Unit:
    """The unit of a store's sequences that `layout` needs."""
    return "line" if layout.kind in ("lines", "pairs") else "document"


def make_rows(store: TokenStore, layout: Layout, *, first: int = 0, count: int = 6) -> Rows:
    """`count` rows of `store`, from position `first` of the first epoch."""
    source = RowSource(store, layout, sequence_length=SEQUENCE_LENGTH, seed=11)
    return source.load(0, np.arange(first, first + count) % len(source))
