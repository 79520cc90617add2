"""Encodes a block of the corpus into a part: one task of `prepare`, in any process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from terakoya.components import EncodedDocuments, FindWords, Tokenizer
from terakoya.components.record_format import RecordFormat
from terakoya.corpus.corpus import EXCERPT_CHARACTERS, Block, Corpus, Document, Reason, Reject
from terakoya.corpus.unread_text import count_unread
from terakoya.errors import UserError
from terakoya.preparation.word_borders import with_words
from terakoya.store.document_sizes import measure_texts
from terakoya.store.parts import PartBuilder, PartFacts
from terakoya.store.recorded_options import UNKNOWN
from terakoya.store.token_store import Unit

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096


def source_name(block: Block) -> str:
    """Returns the name of `block` that its part records."""
    return f"{block.file.name}:{block.start}-{block.stop}"


@dataclass(frozen=True)
class EncodingTask:
    """What a process needs to encode blocks.

    Attributes:
        tokenizer: the component, pickled, so that a process can load plugins before it is unpickled.
        parts: folder of the parts.
        records: the format of what are no plain texts.
        words: the word finder, pickled like `tokenizer`; None leaves words to the tokenizer.
    """

    corpus: Corpus
    tokenizer: bytes
    tokenizer_folder: Path
    parts: Path
    unit: Unit
    append_eos: bool
    records: RecordFormat | None = None
    words: bytes | None = None


class BlockEncoder:
    """Encodes blocks into parts; belongs to one process."""

    def __init__(self, task: EncodingTask) -> None:
        tokenizer: Tokenizer = pickle.loads(task.tokenizer)
        self._task = task
        self._rejects_specials = tokenizer.special_tokens_in_text == "reject"
        self.encoder = tokenizer.encoder(task.tokenizer_folder)
        encode: Any = self.encoder.encode
        whole = tokenizer.keeps_line_ends and task.unit == "document"
        self._encode_text: Callable[..., EncodedDocuments] = partial(encode, whole=True) if whole else encode
        self._encode = self._encode_text
        if task.words is not None:
            if not getattr(self.encoder, "gives_spans", False):
                raise UserError(
                    f"{task.tokenizer_folder}: --words: expected a tokenizer that tells which characters each token "
                    f"stands for, such as SentencePiece, byte-level BPE or a fast tokenizer, got one that "
                    f"{self._words_instead()}"
                )
            find: FindWords = pickle.loads(task.words).build()
            self._encode = with_words(partial(self._encode_text, spans=True), find)
        vocabulary = self.encoder.vocabulary
        if task.records is not None:
            self._encode = task.records.encoder(tokenizer, task.tokenizer_folder, vocabulary)
        if task.append_eos and vocabulary.eos is None:
            raise UserError(
                f"{task.tokenizer_folder}: --append-eos: expected a tokenizer with an end-of-sequence token, this one "
                "has none; leave the option out: rows separate documents by the index anyway"
            )
        self.eos = vocabulary.eos if task.append_eos else None
        others = (vocabulary.pad, vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.bos, vocabulary.eos)
        self._unknown = None if vocabulary.unk in others else vocabulary.unk  # GPT-2's also ends documents

    def _words_instead(self) -> str:
        if self._encode_text(["a"]).word_starts is None:
            return "does not; take the fast tokenizer of the same vocabulary"
        return "knows its own words; leave --words out"

    def encode(self, number: int, block: Block) -> PartFacts:
        """Writes part `number` from `block`. Raises UserError for ids outside the vocabulary."""
        builder = PartBuilder(self.encoder.vocabulary, self._task.unit, self.eos)
        batch: list[Document] = []
        characters = 0
        for item in self._task.corpus.read(block):
            if isinstance(item, Reject):
                self._add(builder, batch)  # first, so that rejects stay in the order of the file
                batch, characters = [], 0
                builder.reject(item)
                continue
            batch.append(item)
            characters += len(item.text)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                self._add(builder, batch)
                batch, characters = [], 0
        self._add(builder, batch)
        return builder.write(self._task.parts, number, source_name(block))

    def _add(self, builder: PartBuilder, batch: Sequence[Document]) -> None:
        if not batch:
            return
        try:
            encoded = self._encode([document.text for document in batch])
        except UserError as error:
            raise UserError(f"{_place(self._find_refused(batch))}: {error}") from error
        except Exception as error:
            error.add_note(f"while encoding {_place(batch)}")
            raise
        if not (encoded.literals and self._rejects_specials):
            encoded = replace(encoded, notes={**encoded.notes, **self._count(encoded)})
            try:
                sizes = None
                if self._task.records is None:
                    sizes = measure_texts(document.text for document in batch)
                    for number, parts in encoded.unread.items():
                        sizes[number] -= measure_texts(parts).sum(axis=0, dtype=sizes.dtype)
                kept = builder.add(encoded, sizes=sizes)
            except UserError as error:
                raise UserError(f"{_place(batch)}: {error}") from error
            for number, document in enumerate(batch):
                if not kept[number]:
                    builder.reject(_reject(document, encoded.rejected.get(number, "no tokens")))
        elif len(batch) == 1:
            builder.reject(_reject(batch[0], "special token in text"))
        else:
            for part in _separate(batch, encoded.literals):
                self._add(builder, part)

    def _count(self, encoded: EncodedDocuments) -> dict[str, int]:
        """Returns the counts UNKNOWN and of `count_unread`, where there are any."""
        count = 0 if self._unknown is None else int((encoded.ids == self._unknown).sum())
        unread = count_unread(part for parts in encoded.unread.values() for part in parts)
        return {**unread, **({UNKNOWN: count} if count else {})}

    def _find_refused(self, batch: Sequence[Document]) -> Sequence[Document]:
        """Returns the first document of `batch` that cannot be encoded; all of them if each can on its own."""
        for document in batch if len(batch) > 1 else ():
            try:
                self._encode([document.text])
            except UserError:
                return [document]
        return batch

    def sample(self, texts: Sequence[str]) -> EncodedDocuments:
        """Encodes a few texts, for estimates; records as they are in the files."""
        return self._encode_text(texts)


def _separate(batch: Sequence[Document], literals: Iterable[str]) -> list[Sequence[Document]]:
    """Splits `batch`, in order, so that each document with one of `literals` in its text is alone; into halves if no
    text has one, because the tokenizer sees other text, as that of a chat template."""
    alone = [any(token in document.text for token in literals) for document in batch]
    cuts = sorted({0, len(batch), *(at + side for at, found in enumerate(alone) if found for side in (0, 1))})
    if len(cuts) == 2:
        cuts.insert(1, len(batch) // 2)
    return [batch[start:stop] for start, stop in pairwise(cuts)]


def _reject(document: Document, reason: Reason) -> Reject:
    return Reject(document.file, document.line, reason, document.text[:EXCERPT_CHARACTERS])


def _place(batch: Sequence[Document]) -> str:
    first, last = batch[0].line, batch[-1].line
    return f"{batch[0].file}, " + (f"line {first}" if first == last else f"documents at lines {first} to {last}")


_encoder: BlockEncoder | None = None


def start_worker(task: EncodingTask) -> None:
    """Prepares this process for `encode_block`."""
    global _encoder
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get("TERAKOYA_PLUGINS"):
        from terakoya import plugins

        plugins.load()
    _encoder = BlockEncoder(task)


def encode_block(number: int, block: Block) -> PartFacts:
    """Does `BlockEncoder.encode` in a worker process."""
    assert _encoder is not None, "start_worker was not called"
    return _encoder.encode(number, block)
