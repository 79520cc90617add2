"""Packing plans: which spans of a token store form each row. A plan is a sidecar of the store, built once and then
memory-mapped.

Letters: R rows of a plan, P pieces of all rows, D documents.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from terakoya.atomic_files import FileFacts, HashedFile, commit_folder, dump_hashed_json, load_hashed_json, take_lock
from terakoya.components.rows import group_indices
from terakoya.errors import UserError
from terakoya.store.file_hashes import find_changes

ALGORITHM = 1
"""Version of the code that decides a plan; part of the plan's name."""
WINDOW = 65_536
"""Number of documents that are packed together, in store order."""
WINDOW_PIECES = 1 << 20
"""Largest number of their pieces, which decides the memory: long documents are packed in smaller windows."""

_DTYPES = {"rows.bin": "<i8", "starts.bin": "<i8", "lengths.bin": "<i4"}
"""The files of a plan, in the order of `Plan`'s arrays, and their types."""

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class Plan:
    """The pieces of each row, in compressed-row form.

    Attributes:
        rows: (R + 1,) int64, the first piece of each row.
        starts: (P,) int64, where each piece starts in the store's tokens.
        lengths: (P,) int32, tokens of each piece, without special tokens.
    """

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rows) - 1


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit-decreasing: the bin of each item, (n,) int64 numbered in order of opening, and the number of bins.

    `lengths` (n,) are in [1, capacity]. The longest item comes first (the earlier of equals); each item goes into the
    fullest bin that has room for it (the most recently changed of equals).
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    bins = np.empty(len(lengths), np.int64)
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]  # by their free room
    rooms = 0  # bit r is set if some bin has room r
    opened = 0
    for item, length in zip(order.tolist(), np.asarray(lengths)[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            bin_number = open_bins[room].pop()
            if not open_bins[room]:
                rooms ^= 1 << room
        else:
            room, bin_number = capacity, opened
            opened += 1
        bins[item] = bin_number
        remaining = room - length
        if remaining:
            open_bins[remaining].append(bin_number)
            rooms |= 1 << remaining
    return bins, opened


def plan_packed_rows(starts: np.ndarray, lengths: np.ndarray, *, sequence_length: int, special_tokens: int) -> Plan:
    """The rows of one window: documents at `starts` (D,) of `lengths` (D,) tokens; each piece needs `special_tokens`
    more.

    A document longer than `sequence_length - special_tokens` is cut into pieces that each fill a row, and a remainder;
    remainders and short documents are packed best-fit-decreasing. Pieces of a row are in store order; empty documents
    are left out.
    """
    body = sequence_length - special_tokens
    starts, lengths = split_spans(starts, lengths, body)
    bins, opened = pack(lengths + special_tokens, sequence_length)
    order = np.argsort(bins, kind="stable")
    rows = np.zeros(opened + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=opened), out=rows[1:])
    return Plan(rows, starts[order], lengths[order].astype(np.int32))


def plan_single_rows(starts: np.ndarray, lengths: np.ndarray, *, sequence_length: int, special_tokens: int) -> Plan:
    """One row for each sequence; a longer one is split into full rows and a remainder; empty ones are left out."""
    starts, lengths = split_spans(starts, lengths, sequence_length - special_tokens)
    return Plan(np.arange(len(starts) + 1), starts, lengths.astype(np.int32))


def split_spans(starts: np.ndarray, lengths: np.ndarray, body: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits spans into pieces of at most `body` tokens, in order: starts and lengths (P,) int64. Empty spans are left
    out."""
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    span, number = group_indices(-(-lengths // body))
    return starts[span] + number * body, np.minimum(lengths[span] - number * body, body)


Spans = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""(first, stop) -> starts and lengths in tokens of the documents (or lines) [first, stop)."""


@dataclass(frozen=True)
class PlanKind:
    """Which plan of a store.

    Attributes:
        kind: "lines" gives one row a line, any other name packs.
        special_tokens: the number of special tokens that each piece needs.
        count: documents (or lines), which are read a `window` at a time.
    """

    kind: str
    sequence_length: int
    special_tokens: int
    count: int
    window: int = WINDOW


def load_or_build_plan(store_folder: Path, fingerprint: str, wanted: PlanKind, spans: Spans) -> Plan:
    """The plan of a store, mapped from its sidecar; the sidecar is built first where it is missing or damaged. Raises
    UserError if neither the store nor the user's cache folder is writable.

    Documents (or lines) are read through `spans`. The sidecar is in STORE/plans/, or in the user's cache folder where
    the store is not writable. One process builds it and renames it into place; the others wait.
    """
    facts: dict[str, str | int] = {
        "algorithm": ALGORITHM,
        "store": fingerprint,
        "kind": wanted.kind,
        "sequence_length": wanted.sequence_length,
        "framing": wanted.special_tokens,
        "window": wanted.window,
        "window_pieces": WINDOW_PIECES,
        "count": wanted.count,
    }
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    parent = _plans_folder(store_folder)
    folder = parent / f"{wanted.kind}-{wanted.sequence_length}-{digest}"
    plan = _open_plan(folder, facts)
    if plan is not None:
        return plan
    with _lock(parent / f"{folder.name}.lock"):
        plan = _open_plan(folder, facts)
        if plan is None:
            if folder.exists():
                logger.warning("%s: damaged; the plan is built again", folder)
            started = time.monotonic()
            _build(folder, facts, spans)
            plan = _open_plan(folder, facts)
            assert plan is not None, f"{folder}: the plan that was just built does not open"
            used = int(np.sum(plan.lengths, dtype=np.int64)) + wanted.special_tokens * len(plan.starts)
            logger.info(
                "%s: planned %s rows of %s tokens from %s documents or lines in %.1f s, %.2f %% full",
                store_folder,
                f"{len(plan):,}",
                f"{wanted.sequence_length:,}",
                f"{wanted.count:,}",
                time.monotonic() - started,
                100 * used / max(1, len(plan) * wanted.sequence_length),
            )
    return plan


def _build(folder: Path, facts: dict[str, str | int], spans: Spans) -> None:
    """Writes the plan window by window into a staging folder, then renames it to `folder`."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    plan_rows = plan_single_rows if facts["kind"] == "lines" else plan_packed_rows
    count, window, most = int(facts["count"]), int(facts["window"]), int(facts["window_pieces"])
    length, special_tokens = int(facts["sequence_length"]), int(facts["framing"])
    first = rows = pieces = 0
    try:
        with ExitStack() as stack:
            files = {name: HashedFile(stack.enter_context((staging / name).open("wb"))) for name in _DTYPES}
            row_file, start_file, length_file = files.values()
            row_file.write(np.zeros(1, "<i8"))
            while first < count:
                starts, lengths = spans(first, min(count, first + window))
                ends = np.cumsum(-(-lengths // (length - special_tokens)))
                size = max(1, int(np.searchsorted(ends, most, side="right")))
                part = plan_rows(starts[:size], lengths[:size], sequence_length=length, special_tokens=special_tokens)
                first += size
                row_file.write((part.rows[1:] + pieces).astype("<i8"))
                start_file.write(part.starts.astype("<i8"))
                length_file.write(part.lengths.astype("<i4"))
                rows += len(part)
                pieces += len(part.starts)
        hashes = {name: file.facts().model_dump() for name, file in files.items()}
        record = {**facts, "rows": rows, "pieces": pieces, "files": hashes}
        (staging / "plan.json").write_bytes(dump_hashed_json(record))
        shutil.rmtree(folder, ignore_errors=True)  # a damaged plan
        try:
            commit_folder(staging, folder)
        except OSError:
            if _open_plan(folder, facts) is None:  # without file locks another process may have been first
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_plan(folder: Path, facts: dict[str, str | int]) -> Plan | None:
    """The plan of `facts` in `folder`, memory-mapped; None where it is missing or damaged. Reads all of it."""
    try:
        record = load_hashed_json((folder / "plan.json").read_bytes())
        files = {name: FileFacts.model_validate(record["files"][name]) for name in _DTYPES}
    except (OSError, ValueError, KeyError):
        return None
    if not facts.items() <= record.items() or next(find_changes(folder, files), None) is not None:
        return None
    return Plan(*(_map_file(folder / name, dtype) for name, dtype in _DTYPES.items()))


def _map_file(file: Path, dtype: str) -> np.ndarray:
    """The file as a plain array over mapped memory (numpy's memmap class makes each indexing slower)."""
    if file.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def _plans_folder(store_folder: Path) -> Path:
    """STORE/plans, or a folder in the user's cache where the store is not writable. UserError if neither is."""
    folder = store_folder / "plans"
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "terakoya" / "plans"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: neither this folder nor {cache} is writable ({error.strerror}), and the packing plan needs "
            "one; make one of them writable or set XDG_CACHE_HOME"
        ) from error
    return cache


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Holds an exclusive lock on `file`. On a file system without locks every process builds the plan itself."""
    with file.open("w") as handle:
        try:
            take_lock(handle.fileno(), fcntl.LOCK_EX, file)
        except OSError as error:
            if error.errno != errno.ENOLCK:
                raise
            logger.warning(
                "%s: this file system has no locks (%s); each process builds the plan itself", file, error.strerror
            )
        yield
