"""Packing plans: every token once, full rows, a sidecar that is built once."""

from __future__ import annotations

import gzip
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_data import real_data

import terakoya
from terakoya.rows import packing
from terakoya.rows.packing import (
    Plan,
    PlanKind,
    load_or_build_plan,
    pack,
    plan_packed_rows,
    plan_single_rows,
    split_spans,
)

DEMO_CORPUS = Path(terakoya.__file__).parent / "corpus" / "demo_corpus.txt"
LENGTHS = st.lists(st.integers(0, 70), max_size=60)


def slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing in plain loops: bins as [free room, time of the last change]."""
    bins: list[list[int]] = []
    chosen = [0] * len(lengths)
    for clock, item in enumerate(sorted(range(len(lengths)), key=lambda each: (-lengths[each], each))):
        fitting = [number for number, (room, _) in enumerate(bins) if room >= lengths[item]]
        if fitting:
            best = min(fitting, key=lambda number: (bins[number][0], -bins[number][1]))
        else:
            bins.append([capacity, 0])
            best = len(bins) - 1
        bins[best] = [bins[best][0] - lengths[item], clock]
        chosen[item] = best
    return chosen


@settings(max_examples=50)
@given(st.lists(st.integers(1, 32), max_size=60))
def test_pack_is_best_fit_decreasing(lengths: list[int]) -> None:
    bins, opened = pack(np.array(lengths, np.int64), 32)
    assert bins.tolist() == slow_best_fit(lengths, 32)
    assert opened == len(set(bins.tolist()))


@settings(max_examples=50)
@given(LENGTHS, st.integers(0, 3))
def test_rows_hold_every_token_once(lengths: list[int], special_tokens: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for plan_rows in (plan_packed_rows, plan_single_rows):
        plan = plan_rows(offsets[:-1], np.array(lengths, np.int64), sequence_length=16, special_tokens=special_tokens)
        held = np.concatenate([np.arange(s, s + n) for s, n in zip(plan.starts, plan.lengths, strict=True)] + [[]])
        assert np.array_equal(np.sort(held), np.arange(offsets[-1]))
        for row in range(len(plan)):
            pieces = slice(plan.rows[row], plan.rows[row + 1])
            assert plan.lengths[pieces].sum() + special_tokens * (pieces.stop - pieces.start) <= 16
            assert np.all(np.diff(plan.starts[pieces]) > 0) and np.all(plan.lengths[pieces] > 0)
    assert len(plan) == plan.rows[-1] == len(plan.starts), "plan_single_rows: one piece a row"


def test_long_documents_are_cut_into_full_rows_and_a_remainder() -> None:
    starts, lengths = split_spans(np.array([100, 200]), np.array([25, 3]), 10)
    assert starts.tolist() == [100, 110, 120, 200] and lengths.tolist() == [10, 10, 5, 3]
    plan = plan_packed_rows(np.array([100, 200]), np.array([25, 3]), sequence_length=12, special_tokens=2)
    rows = [plan.starts[a:b].tolist() for a, b in zip(plan.rows[:-1], plan.rows[1:], strict=True)]
    assert sorted(rows) == [[100], [110], [120, 200]]


def plan_of(folder: Path, lengths: np.ndarray, calls: list[int] | None = None, **options: object) -> Plan:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def spans(first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        if calls is not None:
            calls.append(first)
            time.sleep(0.05)
        return offsets[first:stop], lengths[first:stop]

    settings = {"kind": "packed", "sequence_length": 32, "special_tokens": 2, "count": len(lengths), **options}
    return load_or_build_plan(folder, "fingerprint", PlanKind(**settings), spans)  # type: ignore[arg-type]


def test_sidecar_is_built_once_and_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = np.random.default_rng(0).integers(0, 80, 500)
    calls: list[int] = []
    with caplog.at_level(logging.INFO, "terakoya"), ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(lambda _: plan_of(tmp_path, lengths, calls, window=100), range(4)))
    assert calls == [0, 100, 200, 300, 400], "one builds, the others wait"
    assert "% full" in caplog.text
    for plan in plans[1:]:
        assert np.array_equal(plan.rows, plans[0].rows) and np.array_equal(plan.starts, plans[0].starts)
    held = sum(plans[0].lengths.tolist())
    assert held == lengths.sum()
    assert sorted(p.suffix for p in (tmp_path / "plans").iterdir()) == ["", ".lock"], "no staging folder remains"


def test_windows_of_long_documents_are_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by pieces: 100 documents of 10 pieces each, at most 25 pieces at a time, or one document."""
    windows: list[int] = []

    def record(starts: np.ndarray, lengths: np.ndarray, **options: int) -> Plan:
        plan = plan_packed_rows(starts, lengths, **options)
        windows.append(len(plan.starts))
        return plan

    monkeypatch.setattr("terakoya.rows.packing.plan_packed_rows", record)
    monkeypatch.setattr("terakoya.rows.packing.WINDOW_PIECES", 25)
    lengths = np.full(100, 295)
    lengths[50] = 3000
    plan = plan_of(tmp_path, lengths, sequence_length=32)
    assert max(windows) == 100 and sorted(windows)[-2] == 20
    starts = np.concatenate([plan.starts, plan.starts + plan.lengths])
    assert sum(plan.lengths.tolist()) == lengths.sum() and len(np.unique(starts)) == len(plan.starts) + 1


def test_windows_are_packed_separately(tmp_path: Path) -> None:
    lengths = np.full(10, 3)
    assert len(plan_of(tmp_path, lengths, sequence_length=50)) == 1
    assert len(plan_of(tmp_path, lengths, sequence_length=50, window=5)) == 2


def test_each_setting_has_its_own_plan(tmp_path: Path) -> None:
    lengths = np.full(10, 3)
    plans = [
        plan_of(tmp_path, lengths, sequence_length=length, special_tokens=f) for length in (10, 20) for f in (0, 2)
    ]
    assert [len(plan) for plan in plans] == [4, 5, 2, 3]
    assert len(list((tmp_path / "plans").glob("*/plan.json"))) == 4


@pytest.mark.parametrize("name", ["plan.json", "rows.bin", "lengths.bin"])
def test_a_damaged_plan_is_built_again(tmp_path: Path, name: str) -> None:
    lengths = np.arange(1, 60)
    before = plan_of(tmp_path, lengths)
    expected = before.starts.tolist()
    (file,) = (tmp_path / "plans").glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[:-9])
    assert plan_of(tmp_path, lengths).starts.tolist() == expected


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def spans(first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        load_or_build_plan(tmp_path, "f", PlanKind("packed", 8, special_tokens=2, count=1), spans)
    assert [path.suffix for path in (tmp_path / "plans").iterdir()] == [".lock"]


def test_the_plan_of_a_read_only_store_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packing.os, "access", lambda *_: False)
    store = tmp_path / "store"
    store.mkdir()
    assert len(plan_of(store, np.full(10, 3))) == 2
    assert list((tmp_path / "cache" / "terakoya" / "plans").glob("*/plan.json"))
    assert not list(store.glob("plans/*"))


def check_full_and_quick(folder: Path, lengths: list[int]) -> None:
    """Rows are at least 99 % full, and a million documents are planned in a minute."""
    for sequence_length in (128, 512):
        started = time.process_time()
        plan = plan_of(folder, np.array(lengths), sequence_length=sequence_length)
        seconds = time.process_time() - started
        filled = (plan.lengths.sum() + 2 * len(plan.lengths)) / (len(plan) * sequence_length)
        assert filled >= 0.99
        assert len(lengths) / seconds * 60 >= 1_000_000, "documents a minute"


def test_sentences_of_prose_fill_rows(tmp_path: Path) -> None:
    sentences = [len(each) for each in DEMO_CORPUS.read_text(encoding="utf-8").replace("\n", "。").split("。") if each]
    check_full_and_quick(tmp_path, np.random.default_rng(1).choice(sentences, 66_000).tolist())


@pytest.mark.real_data
def test_real_lines_fill_rows(tmp_path: Path) -> None:
    lengths: list[int] = []
    with gzip.open(real_data("aozora-small.jsonl.gz"), "rt") as lines:
        for line in lines:
            lengths += [len(part) for part in json.loads(line)["text"].split("\n") if part]
            if len(lengths) > 66_000:
                break
    check_full_and_quick(tmp_path, lengths)
