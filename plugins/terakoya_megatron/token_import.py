"""Imports Megatron's token files into a token store.

Letters: V vocabulary size, n sequences and d documents of a chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np

from terakoya.atomic_files import FileFacts
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.assembly import Bits, StoreHead, assemble_store, new_store_folder
from terakoya.store.quick_checks import check_ids, check_some_ids
from terakoya.store.token_store import WORDS, Counts, StoreFacts, Unit
from terakoya.tokenization.recognise import recognise_tokenizer
from terakoya_megatron.token_files import REMEDY, MegatronFiles, Suffix
from terakoya_megatron.word_start_marks import word_start_table

logger = logging.getLogger("terakoya")

CHUNK = 1 << 20
"""Tokens that are read at a time."""
_FEW = 10_000
"""Documents that are sampled to describe files that are refused without `repair`."""
_OTHER_TOKENIZER = "name the tokenizer that the files were made with"


@dataclass(frozen=True)
class IdsOf:
    """The tokenizer whose ids other programs' files hold.

    Attributes:
        fingerprints: identify the tokenizer in `folder`.
        starts_word: (V,) bool, which ids start a word; without it a store has no word starts.
    """

    vocabulary: Vocabulary
    folder: Path
    fingerprints: Mapping[str, str]
    starts_word: np.ndarray | None = None

    @classmethod
    def find(cls, folder: Path, type: str | None, *, word_starts: bool) -> Self:
        """Opens the tokenizer in `folder`, of the registered `type`, recognised if None; with `word_starts` it looks
        for marks of the pieces. Raises UserError as `recognise_tokenizer`."""
        tokenizer = recognise_tokenizer(folder, type=type)
        return cls(
            tokenizer.encoder(folder).vocabulary,
            folder,
            {f"tokenizer {name}": value for name, value in sorted(tokenizer.fingerprint(folder).items())},
            word_start_table(tokenizer, folder) if word_starts else None,
        )


def import_megatron(
    prefix: Path,
    out: Path,
    ids_of: IdsOf,
    *,
    repair: bool = False,
    unit: Unit | None = None,
    eos: int | Literal["find"] | None = "find",
) -> StoreFacts:
    """Makes the token store `out` from the files of `prefix`, whose ids are `ids_of` a tokenizer.

    `unit` None: lines if documents have several sequences (sentences), else documents. `eos` is the id that ends every
    document, None if there is none; "find" takes the special id that ends all documents. `repair` accepts files
    whose index omits the end-of-document ids.

    Raises UserError as `MegatronFiles.open`, for ids outside the vocabulary, for omitted document ends without
    `repair`, if only some documents end with an end-of-document id, and if `out` is not empty.
    """
    files, vocabulary = MegatronFiles.open(prefix), ids_of.vocabulary
    check_some_ids(files.file("bin"), files.tokens, vocabulary.size, remedy=_OTHER_TOKENIZER)
    ended = _find_document_end(files, vocabulary, eos, most=_FEW if files.omits_document_ends and not repair else None)
    if files.omits_document_ends:
        _report_missing_ends(files, ended, repair)
    if unit is None:
        unit = "line" if files.has_sentences else "document"
    elif unit == "line" and not files.has_sentences:
        raise UserError(
            f"{files.prefix}: --unit line: expected documents split into sentences, got documents of one sequence "
            "each; leave the option out, or prepare the text again"
        )
    sequences, documents = files.empty
    if sequences or documents:
        logger.info("left out: %s sequences without a token, %s documents without one", f"{sequences:,}", documents)
    content = MegatronContent(files, vocabulary, unit, ids_of.starts_word)
    with new_store_folder(out) as folder:
        hashes = {f"megatron {suffix}": FileFacts.of(files.file(suffix)).sha256 for suffix in get_args(Suffix)}
        head = StoreHead(
            vocabulary,
            unit,
            ended,
            ids_of.folder,
            {**hashes, **ids_of.fingerprints},
            {"imported": "megatron", "repaired": files.omits_document_ends, "dtype": files.index.dtype.name},
        )
        return assemble_store(folder, content, head)


@dataclass(frozen=True)
class MegatronContent:
    """Megatron's files as the content of a store, which has neither sizes of the text nor rejects. See
    `StoreContent`."""

    files: MegatronFiles
    vocabulary: Vocabulary
    unit: Unit
    starts_word: np.ndarray | None

    @cached_property
    def totals(self) -> Counts:
        tokens = sequences = documents = 0
        for lengths, counts in self.files.chunks():
            tokens += int(lengths.sum())
            documents += len(counts)
            sequences += len(lengths) if self.unit == "line" else len(counts)
        known = frozenset() if self.starts_word is None else frozenset({WORDS})
        return Counts(tokens, sequences, documents, known=known)

    def ids(self) -> Iterator[np.ndarray]:
        """Raises UserError for an id outside the vocabulary."""
        for start in range(0, len(self.files.tokens), CHUNK):
            ids = np.asarray(self.files.tokens[start : start + CHUNK])
            check_ids(self.files.file("bin"), start, ids, self.vocabulary.size, remedy=_OTHER_TOKENIZER)
            yield ids.astype(self.vocabulary.dtype().newbyteorder("<"))

    def lengths(self) -> Iterator[np.ndarray]:
        for lengths, counts in self.files.chunks():
            joined = lengths if self.unit == "line" else np.add.reduceat(lengths, np.cumsum(counts) - counts)
            yield joined.astype("<i4")

    def documents(self) -> Iterator[np.ndarray]:
        for _, counts in self.files.chunks():
            yield counts if self.unit == "line" else np.ones_like(counts)

    def flags(self, name: str) -> Iterator[Bits]:
        assert self.starts_word is not None and name == WORDS
        for ids in self.ids():
            yield np.packbits(self.starts_word[ids], bitorder="little"), len(ids)

    def sizes(self) -> Iterator[np.ndarray]:
        return iter(())

    def rejects(self) -> Iterator[bytes]:
        return iter(())


# ------------------------------------------------------------------------------------------------------------ checks


def _find_document_end(
    files: MegatronFiles, vocabulary: Vocabulary, eos: int | Literal["find"] | None, *, most: int | None
) -> int | None:
    """Returns the id that ends every document, None if there is none. Reads `most` documents if given. Raises UserError
    if only some documents end with it."""
    if eos is None and not files.omits_document_ends:
        return None
    first = int(next(ids for ids in files.last_ids(most=1) if len(ids))[0])
    candidate = first if eos in (None, "find") else int(eos)
    ended = total = with_tokenizer_eos = 0
    for ids in files.last_ids(most=most):
        total, ended = total + len(ids), ended + int(np.count_nonzero(ids == candidate))
        with_tokenizer_eos += 0 if vocabulary.eos is None else int(np.count_nonzero(ids == vocabulary.eos))
    if files.omits_document_ends:
        if ended < total:
            raise UserError(
                f"{files.file('bin')}: holds as many ids beyond its index as there are documents ({total:,}), but "
                f"only {ended:,} documents would then end with id {candidate}: not a missing end of document; {REMEDY}"
            )
        return candidate
    ends = {vocabulary.eos, *(set(vocabulary.special) - {vocabulary.unk})}  # of GPT-2, eos is unk
    if ended == total and (eos != "find" or candidate in ends):
        return candidate
    ended = with_tokenizer_eos if eos == "find" else ended
    if eos == "find" and not with_tokenizer_eos:
        return None
    raise UserError(
        f"{files.prefix}: expected every document to end with id {vocabulary.eos if eos == 'find' else candidate}, or "
        f"none, got {ended:,} of {total:,}; give --eos ID for another id, or --eos none to treat it as an "
        "ordinary token"
    )


def _report_missing_ends(files: MegatronFiles, eos: int | None, repair: bool) -> None:
    documents = len(files.index.documents) - 1 - files.empty[1]
    fault = (
        f"{files.file('idx')}: leaves out the end-of-document id {eos} of each of {documents:,} documents: "
        f"document n begins n tokens too early and the last {documents:,} tokens are never read (a fault of "
        "Megatron-DeepSpeed's preprocess_data.py --append-eod)"
    )
    if not repair:
        raise UserError(f"{fault}; repair it with --repair")
    logger.warning("%s; repaired", fault)
