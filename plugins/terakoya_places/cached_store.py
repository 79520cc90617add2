"""A token store at an address such as s3://bucket/store: its small files are fetched whole, its tokens where they are
read.

What is fetched stays in the user's cache for the next run, `$XDG_CACHE_HOME/terakoya/stores/NAME-FINGERPRINT`, and is
shared by the processes of a machine. Stores that no process uses are removed where room is needed, the one that was
used longest ago first. A store that is larger than the cache is read through a folder of each process's own, in which
the blocks that were read longest ago make room.

See docs/design/object-stores.md.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

import numpy as np

from terakoya.atomic_files import FileFacts, take_lock, wait_for_lock
from terakoya.errors import UserError
from terakoya.store.block_checksums import BLOCK_BYTES, CHECKSUMS, CheckedFile, open_checked_files
from terakoya.store.file_hashes import check_hashes, check_tokenizer
from terakoya.store.token_store import StoreFacts, TokenStore, bytes_of_tokens, read_facts
from terakoya_places.block_budget import BlockBudget, can_remove_blocks
from terakoya_places.fetched_blocks import THREADS, FetchedFile, fetch, fill
from terakoya_places.object_folder import ObjectFolder, cache_folder, cache_name

LIMIT_VARIABLE = "TERAKOYA_CACHE_GB"
"""The variable that says how large the cache of stores may be, in GB."""
LIMIT_GB = 100.0
SPARE_SHARE = 0.1
"""The part of the free disk space that the cache leaves free."""
LEAST_BLOCKS = 64
"""The smallest budget of a process, in blocks: 8 MiB."""
RECORD, INDEX = "store.json", "tokens.idx"
IN_USE = ".in-use"
"""The file of a cached store that processes which use it hold a lock on. In it stands how many bytes it may become."""


@dataclass(frozen=True)
class RemoteStore(TokenStore):
    """A store at an address, which is its `folder`. See `TokenStore`, also for what each method does.

    Attributes:
        cache: the folder of this machine with its index and tokenizer.
        data_cache: that with what is here of the files of tokens and flags: `cache`, or one of this process's own.
        closed: set when nobody uses the store any more.
        budget_bytes: how much of the data files may be here, where that is less than all.
    """

    remote: ObjectFolder = field(repr=False)
    cache: Path
    data_cache: Path
    budget_bytes: int | None
    closed: threading.Event = field(repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return open_remote, (self.remote.address,)

    @property
    def local_folder(self) -> Path:
        return self.cache

    @property
    def data_folder(self) -> Path:
        return self.data_cache

    @cached_property
    def _checked_files(self) -> dict[str, CheckedFile]:
        check_hashes(self.cache, self.facts.files, CHECKSUMS)
        checksums = np.fromfile(self.cache / CHECKSUMS, "<u4")

        def make(file: Path, own: np.ndarray) -> CheckedFile:
            if file.name == INDEX:
                return CheckedFile(file, own)
            return FetchedFile(self.remote, self.data_cache, file.name, self.facts.files[file.name].size, own)

        files = open_checked_files(self.cache, checksums, self.facts.data_files, open_file=make)
        self._skip_lengths(files)
        if self.budget_bytes is None:
            _fill_alone(self.cache, [each for each in files.values() if isinstance(each, FetchedFile)], self.closed)
        return files

    @cached_property
    def _fetched_files(self) -> dict[str, FetchedFile]:
        return {name: file for name, file in self._checked_files.items() if isinstance(file, FetchedFile)}

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, "terakoya-fetch")

    @cached_property
    def _budget(self) -> BlockBudget | None:
        return None if self.budget_bytes is None else BlockBudget(self._fetched_files, self.budget_bytes)

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext() if self._budget is None else self._budget.reading()

    def touch(self, start: np.ndarray, length: np.ndarray | int) -> None:
        if self._budget is None and not any(file.remaining for file in self._fetched_files.values()):
            return
        start, stop = start[real := np.broadcast_to(length, start.shape) > 0], (start + length)[real]
        if not len(start):
            return
        size, budget = self.index.dtype.itemsize, self._budget
        wanted = []
        for name, file in self._fetched_files.items():
            first, end = bytes_of_tokens(name, start, stop, size)
            wanted.append((file, file.find_unchecked(first, end) if budget is None else budget.touch(file, first, end)))
        fetch(self._threads, wanted)
        if budget is not None:
            budget.make_room()


def open_remote(address: str) -> RemoteStore:
    """Opens the store at `address`; fetches what is not in the cache of all but its data files.

    Raises:
        UserError: there is no store, it is damaged, it cannot be read, or the cache has no room for it.
        TemporaryFailure: the object store does not answer.
    """
    remote = ObjectFolder(address)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            remote.download(RECORD, Path(scratch) / RECORD)
        except FileNotFoundError:
            raise UserError(
                f"{remote}: expected a finished token store, found no {RECORD} there; copy the folder of a store there "
                "with the object store's own tool"
            ) from None
        try:
            facts = read_facts(Path(scratch))
        except UserError as error:
            raise UserError(str(error).replace(scratch, str(remote))) from None
        parent = cache_folder() / "stores"
        cache = parent / f"{cache_name(remote.address).rpartition('-')[0]}-{facts.fingerprint[:16]}"
        handles = [_use(cache)]
        with wait_for_lock(parent):
            budget = _make_room(cache, facts)
        own: Path | None = None
        if budget is not None:
            own = Path(tempfile.mkdtemp(prefix=f".{cache.name}.", dir=parent))
            handles.append(_use(own))
            _make_holes(own, facts)
        with wait_for_lock(cache):
            shutil.copyfile(Path(scratch) / RECORD, cache / RECORD)
            _fetch_small(remote, cache, facts)
            _make_holes(cache, facts)
    opened = TokenStore.open(cache, headers_only=True)
    check_tokenizer(cache, facts.files)
    closed = threading.Event()
    store = RemoteStore(Path(address), facts, opened.index, remote, cache, own or cache, budget, closed)
    weakref.finalize(store, _close, closed, handles, own)
    return store


def find_faults(remote: ObjectFolder) -> list[str]:
    """Reads the whole store there; returns what is missing or was changed, a line for each file."""
    with tempfile.TemporaryDirectory() as scratch:
        remote.download(RECORD, Path(scratch) / RECORD)
        try:
            files = read_facts(Path(scratch)).files
        except UserError as error:
            return [str(error).replace(scratch, str(remote))]
    return remote.compare(files)


def _close(closed: threading.Event, handles: Sequence[int], own: Path | None) -> None:
    """Lets others remove the cached store; removes the folder `own`, which no other process uses."""
    closed.set()
    for handle in handles:
        os.close(handle)
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)


def _make_holes(folder: Path, facts: StoreFacts) -> None:
    """Makes the files that are fetched in blocks, of holes where they are not there yet."""
    for name, recorded in facts.data_files.items():
        if name != INDEX:
            with (folder / name).open("ab") as stream:
                stream.truncate(recorded.size)


def _fetch_small(remote: ObjectFolder, cache: Path, facts: StoreFacts) -> None:
    """Fetches all files but those that are fetched in blocks, and the plans of rows that are there."""
    for name, recorded in facts.files.items():
        file = cache / name
        in_blocks = name in facts.data_files and name != INDEX
        if in_blocks or (file.is_file() and FileFacts.of(file) == recorded):
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.fetched")
        try:
            got = remote.download(name, draft)
        except FileNotFoundError as error:
            raise UserError(f"{error}; the store is incomplete: copy it there again") from None
        if got != recorded:
            raise UserError(f"{remote}/{name}: content changed since the store was made; copy it there again")
        draft.replace(file)
    if not (cache / "plans").exists():
        for name in remote.sizes("plans"):
            if not any(part.startswith(".") or part == ".." for part in PurePosixPath(name).parts):
                (cache / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):
                    remote.download(name, cache / name)  # a plan has its own hashes


# ------------------------------------------------------------------------------------------------ the room in the cache


def _make_room(cache: Path, facts: StoreFacts) -> int | None:
    """Removes cached stores that no process uses until all of this one has room. Returns None then; else how many bytes
    of its data files may be here."""
    others = {each: _size_to_be(each) for each in cache.parent.iterdir() if each.is_dir() and each != cache}
    needed = sum(each.size for each in facts.files.values())
    limit = _read_limit() * 1e9
    free = shutil.disk_usage(cache).free * (1 - SPARE_SHARE)
    here, to_come = _size(cache), sum(size - _size(each) for each, size in others.items())

    def room() -> int:
        return int(min(limit - sum(others.values()), free + here - to_come))

    for other in sorted(others, key=_last_used):
        if needed <= room():
            break
        if _remove_unused(other):
            free += others.pop(other)
    if needed <= room():
        (cache / IN_USE).write_text(f"{needed}")  # so that stores opened later leave it that room
        return None
    data = sum(each.size for name, each in facts.data_files.items() if name != INDEX)
    budget = room() - (needed - data)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not can_remove_blocks() or budget < LEAST_BLOCKS * BLOCK_BYTES * processes:
        raise UserError(
            f"{cache}: expected room for {needed / 1e9:,.2f} GB, a token store, got {max(0, room()) / 1e9:,.2f} GB: "
            f"free disk space, set {LIMIT_VARIABLE} to more than {limit / 1e9:g}, or XDG_CACHE_HOME to a larger disk"
        )
    return budget // processes


def _read_limit() -> float:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        limit = float(text) if text else LIMIT_GB
    except ValueError:
        limit = 0.0
    if not limit > 0:  # nan, too
        raise UserError(f'{LIMIT_VARIABLE}: expected a number of GB, such as 50, got "{text}"')
    return limit


def _size(folder: Path) -> int:
    """The bytes that `folder` takes on the disk: holes take none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += 512 * (Path(place) / name).stat().st_blocks
    return total


def _size_to_be(folder: Path) -> int:
    """The bytes that `folder` takes on the disk, or as many as it may become while a process uses it."""
    size = _size(folder)
    try:
        with (folder / IN_USE).open("rb") as stream:
            take_lock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, folder / IN_USE)
            return size
    except BlockingIOError:
        with suppress(ValueError, OSError):
            return max(size, int((folder / IN_USE).read_text()))
    except OSError:  # no such file
        pass
    return size


def _last_used(folder: Path) -> float:
    try:
        return (folder / IN_USE).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _use(cache: Path) -> int:
    """Makes the folder of a cached store and marks it as in use, as long as the returned handle is open."""
    while True:
        cache.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(cache / IN_USE, os.O_RDWR | os.O_CREAT, 0o644)
            os.utime(handle)
            take_lock(handle, fcntl.LOCK_SH, cache / IN_USE)
            if os.path.samestat(os.fstat(handle), (cache / IN_USE).stat()):
                return handle
        except FileNotFoundError:
            pass
        else:
            os.close(handle)  # another process has removed the folder before the lock


def _remove_unused(cache: Path) -> bool:
    try:
        handle = os.open(cache / IN_USE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return False
    try:
        take_lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, cache / IN_USE)
        shutil.rmtree(cache, ignore_errors=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def _fill_alone(cache: Path, files: Sequence[FetchedFile], stop: threading.Event) -> None:
    """Fetches all of `files` in the background, in one process of this machine, until `stop` is set."""
    handle = os.open(cache / ".fill", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        take_lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, cache / ".fill")
    except BlockingIOError:
        os.close(handle)
        return
    fill(files, stop, ended=partial(os.close, handle))
