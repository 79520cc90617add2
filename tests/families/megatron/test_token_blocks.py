"""Blocks hold the whole text once, in order or shuffled, and can be imported into a store; other lines are refused."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import damage
from word_tokenizer import make_folder

from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.token_store import StoreFacts, TokenStore
from terakoya.store.writer import write_store
from terakoya_checks.verify_store import verify
from terakoya_megatron.token_blocks import ExportedBlocks, export_blocks, import_blocks
from terakoya_megatron.token_import import IdsOf

EOS = 5
VOCABULARY = Vocabulary(size=1000, eos=EOS)


def blocks_of(file: Path) -> list[list[int]]:
    raw = file.read_bytes()
    rows = [json.loads(line) for line in (gzip.decompress(raw) if file.suffix == ".gz" else raw).splitlines()]
    assert all(set(row) == {"input_ids", "attention_mask"} for row in rows)
    assert all(row["attention_mask"] == [1] * len(row["input_ids"]) for row in rows)
    return [row["input_ids"] for row in rows]


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(6, 99), min_size=1, max_size=9), min_size=1, max_size=9),
    end=st.sampled_from(["stored", "the tokenizer's", "none"]),
    block_size=st.integers(1, 12),
    seed=st.sampled_from([None, 42]),
)
def test_blocks_are_the_joined_documents_cut(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    end: str,
    block_size: int,
    seed: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    vocabulary = VOCABULARY if end != "none" else Vocabulary(size=1000)
    write_store(folder / "s", [[one] for one in documents], vocabulary=vocabulary, eos=EOS if end == "stored" else None)
    stream = [token for document in documents for token in [*document, *([] if end == "none" else [EOS])]]
    whole, short = divmod(len(stream), block_size)
    expected = [stream[n * block_size : (n + 1) * block_size] for n in range(whole)]
    done = export_blocks(folder / "s", folder / "a.jsonl", block_size=block_size, keep_short=True, shuffle_seed=seed)
    assert done == ExportedBlocks(whole, short, dropped=False)
    written = blocks_of(folder / "a.jsonl")
    assert written[whole:] == ([stream[whole * block_size :]] if short else [])
    assert sorted(written[:whole]) == sorted(expected)
    if seed is None:
        assert written[:whole] == expected
    if whole:
        done = export_blocks(folder / "s", folder / "b.jsonl.gz", block_size=block_size, shuffle_seed=seed)
        assert done == ExportedBlocks(whole, short, dropped=short > 0)
        assert blocks_of(folder / "b.jsonl.gz") == written[:whole]


def test_the_shuffle_seed_decides_the_order(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[np.arange(6, 900)]], vocabulary=VOCABULARY, eos=EOS)
    orders = []
    for number, seed in enumerate([None, 1, 1, 2]):
        export_blocks(tmp_path / "s", tmp_path / f"{number}.jsonl", block_size=10, shuffle_seed=seed)
        orders.append([block[0] for block in blocks_of(tmp_path / f"{number}.jsonl")])
    assert orders[0] == sorted(orders[1]) == sorted(orders[3])
    assert orders[0] != orders[1] == orders[2] != orders[3]
    assert sum(abs(a - b) == 10 for a, b in pairwise(orders[1])) < 20


def import_files(files: list[Path], out: Path, starts_word: np.ndarray | None = None) -> StoreFacts:
    tokenizer = out.with_name("tokenizer")
    if not tokenizer.exists():
        make_folder(tokenizer)
    return import_blocks(files, out, IdsOf(VOCABULARY, tokenizer, {"tokenizer": "x"}, starts_word))


def test_blocks_become_documents_without_their_padding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"input_ids": [7, 8, 9], "attention_mask": [1, 1, 1]},
        {"input_ids": [0, 0, 10], "attention_mask": [0, 0, 1], "labels": [1]},
        {"input_ids": [11, 12]},
        {"input_ids": [0], "attention_mask": [0]},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines[:2]) + "\n\n")
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[2:]).encode()))
    caplog.set_level("INFO")
    facts = import_files([tmp_path / "in"], tmp_path / "store", np.arange(1000) % 2 == 0)
    store = TokenStore.open(tmp_path / "store")
    assert [store.tokens[a:b].tolist() for a, b in pairwise(store.offsets)] == [[7, 8, 9], [10], [11, 12]]
    assert store.word_starts(0, 6).tolist() == [False, True, False, True, False, True]
    assert (facts.unit, facts.eos, facts.options) == ("document", None, {"imported": "blocks"})
    assert set(facts.inputs) == {"blocks", "tokenizer"} and verify(store.folder) == []
    assert caplog.messages == ["left out: 1 of 4 blocks, which hold no token but padding"]
    (tmp_path / "c.json").write_text(lines[0])
    assert import_files([tmp_path / "c.json"], tmp_path / "one").tokens == 3


def test_an_exported_store_can_be_imported(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[np.arange(6, 900)], [[7] * 100]], vocabulary=VOCABULARY, eos=EOS)
    export_blocks(tmp_path / "s", tmp_path / "a.jsonl", block_size=64, keep_short=True)
    import_files([tmp_path / "a.jsonl"], tmp_path / "again")
    assert (tmp_path / "again" / "tokens.bin").read_bytes() == (tmp_path / "s" / "tokens.bin").read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected JSON"),
        ("[1]", 'line 2: expected an object with "input_ids", got list'),
        ('{"text": "a"}', 'line 2: expected an object with "input_ids", got only the keys text'),
        ('{"input_ids": 1}', "line 2: input_ids: expected a list of integers, got int"),
        ('{"input_ids": [1.5]}', "line 2: input_ids: expected a list of integers"),
        ('{"input_ids": [[1], [1, 2]]}', "line 2: input_ids: expected a list of integers"),
        ('{"input_ids": [1, 2], "attention_mask": [1]}', r"line 2: expected as many attention_mask .*\(2\), got 1"),
        ('{"input_ids": [1], "attention_mask": [2]}', "line 2: attention_mask: expected 0 and 1 only, got 2"),
        ('{"input_ids": [1000]}', "line 2: expected ids below 1,000, .*got 1,000; name the tokenizer"),
        ('{"input_ids": [-1]}', "line 2: expected ids below 1,000, .*got -1"),
    ],
)
def test_invalid_blocks_are_reported_and_leave_nothing(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"input_ids": [7]}}\n{line}\n')
    with pytest.raises(UserError, match=f"a.jsonl, {message}"):
        import_files([tmp_path / "a.jsonl"], tmp_path / "store")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "tokenizer"]


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx"])
def test_a_changed_store_is_not_exported(tmp_path: Path, name: str) -> None:
    write_store(tmp_path / "s", [[np.arange(6, 90)], [[7] * 100]] * 5, vocabulary=VOCABULARY)
    damage(tmp_path / "s" / name)
    with pytest.raises(UserError, match=rf"s/{name}: content changed .*expected SHA-256 \w+, got \w+"):
        export_blocks(tmp_path / "s", tmp_path / "a.jsonl", block_size=64, shuffle_seed=1)
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_export_refuses_loss_and_empty_output(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [[[7, 8]]], vocabulary=VOCABULARY, eos=EOS)
    with pytest.raises(UserError, match="expected 4 tokens for a block, got 3; choose a smaller --block-size"):
        export_blocks(tmp_path / "s", tmp_path / "a.jsonl", block_size=4)
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(UserError, match=r"a\.jsonl: expected a new file"):
        export_blocks(tmp_path / "s", tmp_path / "a.jsonl", block_size=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "s"]
