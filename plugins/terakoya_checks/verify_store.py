"""Checks a token store by reading all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from terakoya.atomic_files import FileFacts, load_hashed_json
from terakoya.errors import UserError
from terakoya.store.block_checksums import BLOCK_BYTES, open_checked_files
from terakoya.store.file_hashes import find_changes, find_tokenizer_changes
from terakoya.store.token_store import CHECKSUMS, StoreFacts, TokenStore, content_fingerprint, read_facts

_CHUNK = 1 << 20
_SHOWN = 10
"""Damaged blocks that are named."""


def verify(folder: Path) -> list[str]:
    """Reads the whole store `folder` and returns a description of every fault; an empty list for a valid store.

    Checks store.json and its fingerprint, sizes and hashes of all files, of the tokenizer and of packing plans, that
    ids are in the vocabulary, and that index and documents are consistent. Raises UserError if there is no store.
    """
    folder = Path(folder)
    if not (folder / "store.json").is_file():
        read_facts(folder)  # raises the error that says what is there instead
    try:
        facts = read_facts(folder)
    except UserError as error:
        return [str(error)]
    faults = []
    if facts.fingerprint != content_fingerprint(facts.unit, facts.eos, facts.vocabulary, facts.data_files):
        faults.append(f"{folder / 'store.json'}: fingerprint: expected that of the other facts, got another")
    for name, recorded in facts.files.items():
        if "/" not in name:
            changes = find_changes(folder, {name: recorded})
            faults += [change + _damaged_blocks(folder, facts, name) for change in changes]
    faults += find_tokenizer_changes(folder, facts.files)
    faults += _plan_faults(folder / "plans")
    try:
        store = TokenStore.open(folder, headers_only=True)
    except UserError as error:
        return [*faults, str(error)]
    return [*faults, *_id_faults(store), *_index_faults(store)]


def _damaged_blocks(folder: Path, facts: StoreFacts, name: str) -> str:
    """Says which blocks of the changed file `name` are damaged, where that can be known."""
    checksums, file = facts.files[CHECKSUMS], folder / name
    known = name in facts.data_files and next(find_changes(folder, {CHECKSUMS: checksums}), None) is None
    if not known or not file.is_file() or file.stat().st_size != facts.files[name].size:
        return ""
    files = open_checked_files(folder, np.fromfile(folder / CHECKSUMS, "<u4"), facts.data_files)
    blocks = files[name].damaged_blocks()
    more = f" and {len(blocks) - _SHOWN:,} more" if len(blocks) > _SHOWN else ""
    return f"; damaged blocks of {BLOCK_BYTES >> 10} KiB: {', '.join(map(str, blocks[:_SHOWN]))}{more}"


def _plan_faults(plans: Path) -> list[str]:
    """Faults of packing plans. Training builds a damaged plan again by itself."""
    faults = []
    for file in sorted(plans.glob("*/plan.json")):
        try:
            recorded: Mapping[str, Mapping[str, object]] = load_hashed_json(file.read_bytes())["files"]
            changes = list(find_changes(file.parent, {k: FileFacts.model_validate(v) for k, v in recorded.items()}))
        except (ValueError, KeyError) as error:
            changes = [f"{file}: {error}"]
        faults += [f"{change}; delete the folder, and the next run builds the plan again" for change in changes]
    return faults


def _id_faults(store: TokenStore) -> list[str]:
    size = store.facts.vocabulary.size
    for start, ids in _chunks(store.tokens):
        if int(ids.max()) >= size or int(ids.min()) < 0:
            at = start + int(np.flatnonzero((ids >= size) | (ids < 0))[0])
            file = store.folder / "tokens.bin"
            return [f"{file}: token {at:,}: expected an id below {size:,}, got {store.tokens[at]}"]
    return []


def _index_faults(store: TokenStore) -> list[str]:
    file = store.folder / "tokens.idx"
    index, faults, position = store.index, [], 0
    for start, lengths in _chunks(index.lengths):
        ends = position + np.cumsum(lengths, dtype=np.int64)
        starts = np.concatenate([[position], ends[:-1]]) * index.dtype.itemsize
        if int(lengths.min()) < 1 or not np.array_equal(starts, index.pointers[start : start + len(lengths)]):
            faults.append(
                f"{file}: lengths and byte pointers disagree in sequences {start:,} to {start + len(lengths):,}"
            )
        position = int(ends[-1])
    if position != store.facts.tokens:
        faults.append(f"{file}: lengths add up to {position:,} tokens, expected {store.facts.tokens:,}")
    documents = index.documents
    increasing = all(bool((np.diff(documents[s : s + _CHUNK + 1]) > 0).all()) for s in range(0, len(documents), _CHUNK))
    if documents[0] != 0 or documents[-1] != len(index.lengths) or not increasing:
        faults.append(f"{file}: expected document entries that rise from 0 to {len(index.lengths):,}")
    return faults


def _chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(array), _CHUNK):
        yield start, array[start : start + _CHUNK]
