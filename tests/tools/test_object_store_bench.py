"""`tools/bench/object_store.py`: a store behind a link of 50 ms costs a run nothing that counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from tool_modules import load_tool

from terakoya.store import remote_blocks, remote_store

SHARE = 0.03
"""The part of a step's time that a run may wait for rows."""


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_tool("bench/object_store")


@pytest.mark.slow
def test_steps_do_not_wait_for_a_store_far_away(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with a cache of a quarter of the store, in which most rows find nothing: each step fetches again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_store, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(remote_blocks, "REQUEST_BLOCKS", 1)
    fsspec.register_implementation("far", bench.FarFileSystem, clobber=True)
    monkeypatch.setattr(bench.FarFileSystem, "requests", 0)
    store = bench.make_store(tmp_path / "store", 3_000_000)
    size = sum(facts.size for facts in store.facts.files.values())
    monkeypatch.setenv(remote_store.LIMIT_VARIABLE, str(size / 4 / 1e9))
    opened = remote_store.open_store(Path(f"far:/{tmp_path}/store"))
    assert isinstance(opened, remote_store.RemoteStore) and opened.budget_bytes is not None
    share, _ = bench.waits(opened, steps=10, step_seconds=0.3, rows=12)
    assert bench.FarFileSystem.requests > 10 * 8 and share <= SHARE
