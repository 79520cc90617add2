"""Real lines of text, tokenised once: what both sides of a comparison train on."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from terakoya.components.vocabulary import Vocabulary
from terakoya.store.token_store import TokenStore
from terakoya.store.writer import write_store

UNUSED = 100
"""Special tokens that never occur in random ids, such as the sentinels of span corruption."""


@dataclass(frozen=True)
class Lines:
    """Lines as ids without special tokens.

    Attributes:
        ids: each line's ids, cut so that [CLS] line [SEP] fits the sequence length.
        word_starts: beside them, True where a word starts.
    """

    ids: list[np.ndarray]
    word_starts: list[np.ndarray]
    vocabulary: Vocabulary
    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path

    def framed(self) -> list[list[int]]:
        """Every line as [CLS] line [SEP]."""
        return [[self.vocabulary.cls, *line.tolist(), self.vocabulary.sep] for line in self.ids]

    def store(self, folder: Path) -> TokenStore:
        """A token store in which each line is a document of its own."""
        return write_store(
            folder,
            ([line] for line in self.ids),
            vocabulary=self.vocabulary,
            unit="document",
            word_starts=([words] for words in self.word_starts),
            tokenizer_folder=self.tokenizer_folder,
        )


def read(corpus: Path, tokenizer_folder: Path, *, count: int, sequence_length: int) -> Lines:
    """`count` lines of the jsonl[.gz] or text file `corpus`, drawn with a fixed seed."""
    content = gzip.decompress(corpus.read_bytes()) if corpus.suffix == ".gz" else corpus.read_bytes()
    texts = content.decode().split("\n")
    if ".jsonl" in corpus.name:
        texts = [json.loads(text)["text"] for text in texts if text]
    texts = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    drawn = random.Random(0).sample(texts, min(count, len(texts)))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True, trust_remote_code=False)
    is_piece = np.zeros(len(tokenizer), dtype=bool)
    named = tokenizer.get_vocab()
    is_piece[[number for token, number in named.items() if token.startswith("##")]] = True
    ids = [
        np.asarray(
            tokenizer(text, add_special_tokens=False, truncation=True, max_length=sequence_length - 2)["input_ids"]
        )
        for text in drawn
    ]
    ids = [line for line in ids if len(line)]
    special = {*tokenizer.all_special_ids, *(number for token, number in named.items() if token.startswith("[unused"))}
    vocabulary = Vocabulary(
        size=len(tokenizer),
        pad=tokenizer.pad_token_id,
        unk=tokenizer.unk_token_id,
        cls=tokenizer.cls_token_id,
        sep=tokenizer.sep_token_id,
        mask=tokenizer.mask_token_id,
        special=tuple(sorted(special)),
    )
    return Lines(ids, [~is_piece[line] for line in ids], vocabulary, tokenizer, tokenizer_folder)


def drawn(folder: Path, *, count: int, mean_length: int, sequence_length: int, vocabulary_size: int = 32768) -> Lines:
    """`count` lines of random ids, their lengths spread around `mean_length`, with a tokenizer made in `folder`.

    For measurements in which only shapes matter; every word is one token.
    """
    folder.mkdir(parents=True)
    named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"[unused{number}]" for number in range(UNUSED))]
    special = tuple(range(len(named)))
    named += [f"t{number}" for number in range(len(named), vocabulary_size)]
    (folder / "vocab.txt").write_text("\n".join(named) + "\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.normal(np.log(mean_length) - 0.32, 0.8, count))  # log-normal, of this mean
    lengths = np.clip(np.rint(lengths), 1, sequence_length - 2).astype(np.int64)
    ids = [generator.integers(len(special), vocabulary_size, length) for length in lengths]
    vocabulary = Vocabulary(size=vocabulary_size, pad=0, unk=1, cls=2, sep=3, mask=4, special=special)
    return Lines(ids, [np.ones(len(line), bool) for line in ids], vocabulary, tokenizer, folder)
