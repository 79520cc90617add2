"""Exports and imports fixed blocks of ids as JSON lines, `{"input_ids": [...], "attention_mask": [...]}`: the format
that scripts with Hugging Face datasets train on after they tokenized, joined and cut text (`group_texts`).
"""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from terakoya.atomic_files import HashedFile, write_atomically
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.files import Source, content_hash, find_files, open_decompressed
from terakoya.errors import UserError
from terakoya.places import check_local
from terakoya.store.file_hashes import check_hashes
from terakoya.store.spans import Spans
from terakoya.store.token_store import StoreFacts, TokenStore
from terakoya.store.writer import write_store
from terakoya.toolkit.random_keys import hash_u64, permute
from terakoya_megatron.token_import import IdsOf

logger = logging.getLogger("terakoya")

_ORDER = 4096
"""Blocks whose order is computed at a time."""


@dataclass(frozen=True)
class ExportedBlocks:
    """The number of whole blocks, the tokens of the short block at the end, and whether the short block was dropped."""

    blocks: int
    short: int
    dropped: bool


def export_blocks(
    folder: Path, out: Path, *, block_size: int, keep_short: bool = False, shuffle_seed: int | None = None
) -> ExportedBlocks:
    """Writes the store in `folder` as blocks of `block_size` tokens into the new file `out`, gzipped if it ends in .gz.

    Documents are joined in order, each followed by its end-of-document id (the tokenizer's if the store has none, no id
    if the tokenizer has none either), and cut; the last, short block is dropped unless `keep_short`. `shuffle_seed`
    shuffles the whole blocks; None leaves them in order.

    Raises UserError if the ids or the index do not have the hashes in `store.json` (this reads them once more, which
    takes little time compared with writing JSON), for a store of conversations, for a store smaller than a block, and
    if `out` exists.
    """
    if block_size < 1:
        raise UserError(f"--block-size: expected at least 1, got {block_size}")
    check_local(out, "a new file")
    if (out := Path(out)).exists():
        raise UserError(f"{out}: expected a new file, got one that exists; choose another --out")
    store = TokenStore.open(Path(folder))
    if store.facts.learned:
        raise UserError(
            f"{folder}: expected a store of text, got one of conversations: blocks of ids cannot mark the tokens of "
            "answers, and they cut conversations"
        )
    stream = _Stream(store)
    whole, short = divmod(len(stream), block_size)
    if not whole and not (short and keep_short):
        raise UserError(
            f"{folder}: expected {block_size:,} tokens for a block, got {short:,}; choose a smaller --block-size, or "
            "--keep-short"
        )
    check_hashes(store.folder, store.facts.files, "tokens.bin", "tokens.idx")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _open_new(out) as file:
        for number in _block_order(whole, shuffle_seed):
            file.write(_format_block(stream.read(number * block_size, (number + 1) * block_size)))
        if short and keep_short:
            file.write(_format_block(stream.read(whole * block_size, len(stream))))
    return ExportedBlocks(whole, short, bool(short) and not keep_short)


def import_blocks(sources: Sequence[Path | str], out: Path, ids_of: IdsOf) -> StoreFacts:
    """Makes the store `out` from the blocks in `sources` (files of JSON lines, plain or compressed, folders, patterns).

    Each block is a document: its ids where `attention_mask` is 1, or all ids without a mask. Raises UserError with file
    and line for anything but a block of the `ids_of` a tokenizer, and if `out` is not empty.
    """
    vocabulary, starts_word = ids_of.vocabulary, ids_of.starts_word
    files: list[Source] = []
    for source in sources:  # a single file may have any suffix
        files += [Path(source)] if Path(source).is_file() else find_files([source])
    words = None if starts_word is None else ([starts_word[ids]] for ids in _read_blocks(files, vocabulary))
    blocks = 0

    def documents() -> Iterator[list[np.ndarray]]:
        nonlocal blocks
        for ids in _read_blocks(files, vocabulary):
            blocks += 1
            yield [ids]

    hashes = [[file.name, content_hash(file)] for file in files]
    store = write_store(
        out,
        documents(),
        vocabulary=vocabulary,
        word_starts=words,
        tokenizer_folder=ids_of.folder,
        inputs={"blocks": hashlib.sha256(orjson.dumps(hashes)).hexdigest(), **ids_of.fingerprints},
        options={"imported": "blocks"},
    )
    if empty := blocks - store.facts.documents:
        logger.info("left out: %s of %s blocks, which hold no token but padding", f"{empty:,}", f"{blocks:,}")
    return store.facts


class _Stream:
    """All documents of a store, each followed by its end-of-document id; blocks are cut from it."""

    def __init__(self, store: TokenStore) -> None:
        self._spans, self._tokens = Spans(store), store.tokens
        self._stored = store.facts.eos is not None
        self._end = store.facts.eos if self._stored else store.facts.vocabulary.eos
        if self._end is None:
            logger.info("the tokenizer has no end-of-sequence id: documents are joined without one")

    def __len__(self) -> int:
        return len(self._tokens) if self._stored or self._end is None else self._spans.stream_length

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the ids at positions [start, stop)."""
        if self._stored or self._end is None:
            return np.asarray(self._tokens[start:stop])
        first, last = self._spans.document_at(np.array([start, stop - 1]))
        starts, lengths = self._spans.documents(int(first), int(last) + 1)
        parts: list[np.ndarray] = []
        for begin, length in zip(starts, lengths, strict=True):
            parts += [self._tokens[begin : begin + length], np.array([self._end], self._tokens.dtype)]
        skip = start - int(self._spans.stream_start(np.array([first]))[0])
        return np.concatenate(parts)[skip : skip + stop - start]


def _block_order(count: int, seed: int | None) -> Iterator[int]:
    for start in range(0, count, _ORDER):
        numbers = np.arange(start, min(start + _ORDER, count))
        yield from (numbers if seed is None else permute(numbers, count, hash_u64(seed, "blocks"))).tolist()


def _format_block(ids: np.ndarray) -> bytes:
    block = {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)}
    return orjson.dumps(block, option=orjson.OPT_APPEND_NEWLINE)


@contextmanager
def _open_new(file: Path) -> Iterator[HashedFile | gzip.GzipFile]:
    """Yields `file` for writing, through gzip if its name ends in .gz."""
    with write_atomically(file) as plain:
        if file.suffix == ".gz":
            with gzip.GzipFile("", "wb", fileobj=plain, mtime=0) as packed:
                yield packed
        else:
            yield plain


def _read_blocks(files: Sequence[Source], vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    for file in files:
        with open_decompressed(file) as (stream, _):
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _parse_block(f"{file}, line {number}", line, vocabulary)


def _parse_block(place: str, line: bytes, vocabulary: Vocabulary) -> np.ndarray:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{place}: expected JSON, got something else ({error}); make the file again") from None
    if not isinstance(value, dict) or "input_ids" not in value:
        got = f"only the keys {', '.join(value)}" if isinstance(value, dict) else type(value).__name__
        raise UserError(f'{place}: expected an object with "input_ids", got {got}')
    ids, mask = (_parse_integers(place, name, value.get(name)) for name in ("input_ids", "attention_mask"))
    assert ids is not None, "input_ids is in the object"
    if mask is not None:
        if len(mask) != len(ids):
            raise UserError(f"{place}: expected as many attention_mask as input_ids ({len(ids):,}), got {len(mask):,}")
        if ((mask != 0) & (mask != 1)).any():
            raise UserError(f"{place}: attention_mask: expected 0 and 1 only, got {mask.min()} to {mask.max()}")
        ids = ids[mask == 1]
    if len(ids) and (int(ids.max()) >= vocabulary.size or int(ids.min()) < 0):
        bad = ids[(ids >= vocabulary.size) | (ids < 0)][0]
        raise UserError(
            f"{place}: expected ids below {vocabulary.size:,}, the size of the tokenizer's vocabulary, got {bad:,}; "
            "name the tokenizer that the blocks were made with"
        )
    return ids


def _parse_integers(place: str, name: str, value: object) -> np.ndarray | None:
    if value is None and name != "input_ids":
        return None
    if not isinstance(value, list):
        raise UserError(f"{place}: {name}: expected a list of integers, got {type(value).__name__}")
    try:
        array = np.array(value) if value else np.zeros(0, np.int64)
    except ValueError:
        array = np.zeros(0)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{place}: {name}: expected a list of integers, got something else in it")
    return array
