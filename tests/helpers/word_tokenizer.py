"""A tokenizer for tests: words between spaces, cut into pieces of three characters, ids by checksum."""

from __future__ import annotations

import multiprocessing
import os
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from terakoya.components import EncodedDocuments, Tokenizer
from terakoya.components.vocabulary import Vocabulary

SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "</s>": 5}
FIRST_ORDINARY = 6
PLUGIN = """
from terakoya import hookimpl
from word_tokenizer import WordTokenizer

class FileTokenizer(WordTokenizer):
    pass

@hookimpl
def register_tokenizers():
    return {"words": FileTokenizer}
"""
"""A file that registers the tokenizer."""


def piece_id(piece: str, size: int) -> int:
    """The id of an ordinary piece."""
    return FIRST_ORDINARY + zlib.crc32(piece.encode()) % (size - FIRST_ORDINARY)


def line_ids(line: str, size: int) -> tuple[list[int], list[bool]]:
    """The ids of a line and which of them start a word; words that begin with "~" have none."""
    ids, starts = [], []
    for word in line.split(" "):
        if word in SPECIAL:
            ids.append(SPECIAL[word])
            starts.append(True)
        elif not word.startswith("~"):
            for at in range(0, len(word), 3):
                ids.append(piece_id(word[at : at + 3], size))
                starts.append(at == 0)
    return ids, starts


class WordEncoder:
    def __init__(self, tokenizer: WordTokenizer, folder: Path) -> None:
        self.tokenizer = tokenizer
        self.size = int((folder / "size.txt").read_text())
        eos = SPECIAL["</s>"] if tokenizer.has_eos else None
        self.vocabulary = Vocabulary(
            size=self.size, pad=0, unk=1, cls=2, sep=3, mask=4, eos=eos, special=tuple(SPECIAL.values())
        )

    def encode(self, documents: Sequence[str]) -> EncodedDocuments:
        time.sleep(float(os.environ.get("WORD_TOKENIZER_DELAY", "0")))
        if multiprocessing.parent_process() is not None:
            time.sleep(float(os.environ.get("WORD_TOKENIZER_WORKER_DELAY", "0")))
        if any("die!" in document for document in documents):
            os._exit(9)
        ids: list[int] = []
        starts: list[bool] = []
        line_lengths: list[int] = []
        document_lines: list[int] = []
        literals: Counter[str] = Counter()
        for document in documents:
            before = len(line_lengths)
            for line in document.split("\n"):
                line_tokens, line_starts = line_ids(line, self.size + self.tokenizer.beyond)
                literals.update(word for word in line.split(" ") if word in SPECIAL)
                ids += line_tokens
                starts += line_starts
                if line_tokens:
                    line_lengths.append(len(line_tokens))
            document_lines.append(len(line_lengths) - before)
        return EncodedDocuments(
            ids=np.array(ids, dtype=np.int64),
            line_lengths=np.array(line_lengths, dtype=np.int32),
            document_lines=np.array(document_lines, dtype=np.int32),
            word_starts=np.array(starts, dtype=bool) if self.tokenizer.knows_words else None,
            literals=literals,
        )


class WordTokenizer(Tokenizer):
    knows_words: bool = True
    has_eos: bool = True
    beyond: int = 0
    """How many ids too large the encoder makes."""

    @classmethod
    def from_folder(cls, folder: Path) -> WordTokenizer | None:
        return cls() if (folder / "size.txt").exists() else None

    def encoder(self, folder: Path) -> WordEncoder:
        return WordEncoder(self, folder)

    def fingerprint(self, folder: Path) -> Mapping[str, str]:
        return {"vocabulary": (folder / "size.txt").read_text()}


def make_folder(folder: Path, *, size: int = 1000) -> Path:
    """A tokenizer's folder, with weights beside it that do not belong to the tokenizer."""
    folder.mkdir()
    (folder / "size.txt").write_text(str(size))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder
