"""Whether the files of a store are still those that its `store.json` recorded: asked by whatever makes a store or a
file of a store, so that a damaged one does not become a new one that looks sound."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore

_CHUNK = 1 << 20


def read_recorded(store: TokenStore, name: str, *, chunk_bytes: int = _CHUNK) -> Iterator[bytes]:
    """The bytes of `store`'s file `name`, hashed as they pass. Raises UserError after the last of them if they are not
    those that were recorded."""
    digest = hashlib.sha256()
    with (store.folder / name).open("rb") as stream:
        while chunk := stream.read(chunk_bytes):
            digest.update(chunk)
            yield chunk
    check_digest(store, name, digest.hexdigest())


def check_recorded(store: TokenStore, *names: str) -> None:
    """Reads the files `names` of `store`. Raises UserError for the first that is not what was recorded."""
    for name in names:
        with (store.folder / name).open("rb") as stream:
            check_digest(store, name, hashlib.file_digest(stream, "sha256").hexdigest())


def check_digest(store: TokenStore, name: str, digest: str) -> None:
    """Raises UserError unless `digest` is the SHA-256 that `store.json` recorded of the file `name`."""
    recorded = store.facts.files.get(name)
    expected = "one in store.json, which has none" if recorded is None else recorded.sha256
    if digest != expected:
        raise UserError(
            f"{store.folder / name}: content changed since the store was made: expected SHA-256 {expected}, got "
            f"{digest}; `terakoya store verify` tells more; prepare the store again or take a copy that is sound"
        )
