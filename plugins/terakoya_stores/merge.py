"""Merges stores into one, as if their corpora had been prepared together: streamed, in constant memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson

from terakoya.atomic_files import check_new_folder
from terakoya.errors import UserError
from terakoya.store.assembly import Bits, Options, StoreHead, assemble_store, new_store_folder
from terakoya.store.file_hashes import check_hashes, read_and_check
from terakoya.store.recorded_options import SHARD, SHARD_BLOCKS, WORDS_INPUT
from terakoya.store.token_store import WORDS, Counts, StoreFacts, TokenStore
from terakoya.store.tokenizer_identity import find_different_ids

_CHUNK = 1 << 20


def merge(folders: Sequence[Path], out: Path, *, word_starts: bool = True) -> StoreFacts:
    """Makes the store `out` from the stores `folders`, one after the other.

    Its data files are those of one `prepare` over all their corpora; stores of the shards 1/n to n/n of one corpus, in
    this order, give the whole store of that corpus, including `store.json`. `word_starts` false leaves word starts
    out.

    Compares every file with the hash in its `store.json`. Raises UserError if a store is damaged or differs from the
    first in vocabulary, tokenizer, unit, end of document, id type, word starts or answers, for shards in another order
    or with gaps, and if `out` is not empty.
    """
    if len(folders) < 2:
        raise UserError(f"expected two stores or more to merge, got {len(folders)}")
    check_new_folder(Path(out))
    stores = tuple(TokenStore.open(Path(folder)) for folder in folders)
    for store in stores[1:]:
        _check_compatible(stores[0], store, word_starts)
    for store in stores:
        check_hashes(store.folder, store.facts.files, "tokens.idx")
    inputs, options = _merge_records(stores)
    totals = sum((store.facts.counts for store in stores), Counts())
    if not word_starts:
        totals = replace(totals, known=totals.known - {WORDS})
    with new_store_folder(out) as folder:
        head = StoreHead.of(stores[0], inputs=inputs, options=options)
        return assemble_store(folder, MergedContent(stores, totals), head)


@dataclass(frozen=True)
class MergedContent:
    """Stores, one after the other, as a `StoreContent`."""

    stores: tuple[TokenStore, ...]
    totals: Counts

    def ids(self) -> Iterator[bytes]:
        for store in self.stores:
            yield from read_and_check(store.folder, store.facts.files, "tokens.bin", chunk_bytes=_CHUNK)

    def lengths(self) -> Iterator[np.ndarray]:
        for store in self.stores:
            yield from _chunks(store.index.lengths)

    def documents(self) -> Iterator[np.ndarray]:
        for store in self.stores:
            for start in range(0, store.facts.documents, _CHUNK):
                yield np.diff(store.documents[start : start + _CHUNK + 1])

    def flags(self, name: str) -> Iterator[Bits]:
        for store in self.stores:
            remaining = store.facts.tokens
            for chunk in read_and_check(store.folder, store.facts.files, f"tokens.{name}", chunk_bytes=_CHUNK):
                yield chunk, min(remaining, 8 * len(chunk))
                remaining -= 8 * len(chunk)

    def sizes(self) -> Iterator[np.ndarray]:
        for store in self.stores:
            yield from _chunks(store.sizes)

    def rejects(self) -> Iterator[bytes]:
        for store in self.stores:
            if store.facts.rejected:
                yield from read_and_check(store.folder, store.facts.files, "rejects.jsonl", chunk_bytes=_CHUNK)


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(array), _CHUNK):
        yield array[start : start + _CHUNK]


# ---------------------------------------------------------------------------------------------------- compatibility


def _check_compatible(first: TokenStore, other: TokenStore, word_starts: bool) -> None:
    ours, theirs = first.facts, other.facts
    tokenizers = [{k: v for k, v in facts.inputs.items() if k.startswith("tokenizer ")} for facts in (ours, theirs)]
    facts: dict[str, tuple[object, object]] = {
        "id type": (ours.dtype, theirs.dtype),
        "unit": (ours.unit, theirs.unit),
        "end of document": (ours.eos, theirs.eos),
        "vocabulary size": (ours.vocabulary.size, theirs.vocabulary.size),
        "vocabulary": (ours.vocabulary, theirs.vocabulary),
        "answers": ("marked" if ours.learned else "not marked", "marked" if theirs.learned else "not marked"),
    }
    if all(tokenizers):
        folders = first.tokenizer_folder, other.tokenizer_folder
        if tokenizers[0] != tokenizers[1] and (different := find_different_ids(*folders)):
            raise UserError(
                f"{other.folder}: was prepared with another tokenizer than {first.folder} ({different}); prepare it "
                "with the same"
            )
        facts |= {
            name: (tokenizers[0].get(name), tokenizers[1].get(name)) for name in {**tokenizers[0], **tokenizers[1]}
        }
    if word_starts:
        known = ["known" if each.word_starts else "not known" for each in (ours, theirs)]
        facts["word starts"] = (known[0], known[1])
        facts["words"] = (ours.options.get(WORDS_INPUT), theirs.options.get(WORDS_INPUT))
    for name, (wanted, got) in facts.items():
        if wanted != got:
            hint = (
                "merge without them: --no-word-starts"
                if name in ("word starts", "words")
                else "prepare it again with the same tokenizer and options"
            )
            raise UserError(f"{other.folder}: {name}: expected {wanted} as in {first.folder}, got {got}; {hint}")


# -------------------------------------------------------------------------------------------- inputs and options


def _merge_records(stores: Sequence[TokenStore]) -> tuple[Mapping[str, str], Options]:
    """Returns inputs and options of the merged store; for all shards of one corpus they are those of the whole one."""
    shards = [store.facts.inputs.get(SHARD) for store in stores]
    inputs = [{k: v for k, v in store.facts.inputs.items() if k != SHARD} for store in stores]
    options = [{k: v for k, v in store.facts.options.items() if k not in (SHARD, SHARD_BLOCKS)} for store in stores]
    if all(each == inputs[0] for each in inputs) and all(shards):
        count = len(shards)
        expected = [f"{number}/{count}" for number in range(1, count + 1)]
        if shards != expected:
            raise UserError(
                f"expected the shards {', '.join(expected)} of one corpus in this order, got "
                f"{', '.join(str(shard) for shard in shards)}; name them all, in order"
            )
        check_adjacent([str(store.facts.options[SHARD_BLOCKS]) for store in stores])
        return inputs[0], options[0]
    facts = [store.facts for store in stores]
    all_inputs = {
        name: [each.inputs.get(name, "") for each in facts] for name in {k: 0 for each in facts for k in each.inputs}
    }
    all_options = {
        name: [each.options.get(name) for each in facts] for name in {k: 0 for each in facts for k in each.options}
    }
    return (
        {"merged": _hash([each.fingerprint for each in facts])}
        | {name: values[0] if len(set(values)) == 1 else _hash(values) for name, values in all_inputs.items()},
        {"merged": len(stores)}
        | {
            name: values[0] if len(set(values)) == 1 else ", ".join(map(str, values))
            for name, values in all_options.items()
        },
    )


def _hash(values: Sequence[str]) -> str:
    return hashlib.sha256(orjson.dumps(values)).hexdigest()


def check_adjacent(extents: Sequence[str]) -> None:
    """Raises UserError unless each of these shards of one corpus begins where the shard before it ends."""
    for number, (extent, next_extent) in enumerate(pairwise(extents), start=1):
        end, begin = extent.split(" to ")[-1], next_extent.split(" to ")[0]
        if begin != end and not (end.endswith(":end") and begin.endswith(":0")):
            raise UserError(
                f"shards {number} and {number + 1}: expected the second to begin where the first ends ({end}), it "
                f"begins at {begin}; different versions of Python prepared them: prepare them again with one version"
            )
