"""Checks that the files of a store still have the hashes that `store.json` records. Everything that makes a store or a
file from a store does so: a damaged store must not become a new one that looks valid."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore

_CHUNK = 1 << 20


def read_and_check(store: TokenStore, name: str, *, chunk_bytes: int = _CHUNK) -> Iterator[bytes]:
    """Yields the bytes of the file `name` of `store`. Raises UserError after the last chunk if their hash is not the
    recorded one."""
    digest = hashlib.sha256()
    with (store.folder / name).open("rb") as stream:
        while chunk := stream.read(chunk_bytes):
            digest.update(chunk)
            yield chunk
    check_hash(store, name, digest.hexdigest())


def check_hashes(store: TokenStore, *names: str) -> None:
    """Reads the files `names` of `store`. Raises UserError for the first whose hash is not the recorded one."""
    for name in names:
        with (store.folder / name).open("rb") as stream:
            check_hash(store, name, hashlib.file_digest(stream, "sha256").hexdigest())


def check_hash(store: TokenStore, name: str, digest: str) -> None:
    """Raises UserError unless `digest` is the SHA-256 that `store.json` records for the file `name`."""
    recorded = store.facts.files.get(name)
    expected = "one in store.json, which has none" if recorded is None else recorded.sha256
    if digest != expected:
        raise UserError(
            f"{store.folder / name}: content changed since the store was made: expected SHA-256 {expected}, got "
            f"{digest}; `terakoya store verify` lists every fault; prepare the store again or use an intact copy"
        )
