"""The merged shards of a corpus are the store of one run to the byte, including store.json."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
from small_preparation import prepare_corpus
from word_tokenizer import WordTokenizer, make_folder

from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.preparation.sharding import Shard, ShardBlocks
from terakoya.store.token_store import StoreFacts
from terakoya_stores.merge import check_adjacent, merge


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Five files, some of them compressed, one empty, with bad lines."""
    rows = [json.dumps({"text": f"word{i * i} abc\nline{i}" * (1 + i % 7)}) for i in range(400)] + ["{"]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:100], "{"]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[100:250]).encode(), 1))
    (tmp_path / "c.jsonl").touch()
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[250:300]).encode()))
    (tmp_path / "e.jsonl").write_text("\n".join(rows[300:]))
    return Corpus(
        [tmp_path / f for f in ("a.jsonl", "b.jsonl.gz", "c.jsonl", "d.jsonl.gz", "e.jsonl")], block_bytes=700
    )


def make(corpus: Corpus, tmp_path: Path, name: str, shard: str | None = None) -> StoreFacts:
    tokenizer = tmp_path / "tokenizer"
    if not tokenizer.exists():
        make_folder(tokenizer)
    return prepare_corpus(corpus, WordTokenizer(), tokenizer, tmp_path / name, max_rejects=1.0, shard=shard)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_merged_shards_are_the_store_of_one_run(
    corpus: Corpus, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya.preparation.job._MIN_BLOCK", 700)
    whole = make(corpus, tmp_path, "whole")
    names = [f"s{number}" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        assert make(corpus, tmp_path, name, f"{number}/{count}").documents < whole.documents
    merge([tmp_path / name for name in names], tmp_path / "merged")
    files = {str(file.relative_to(tmp_path / "whole")) for file in (tmp_path / "whole").rglob("*") if file.is_file()}
    assert files == {
        *("tokens.bin", "tokens.idx", "tokens.words", "tokens.checksums", "documents.sizes", "store.json"),
        "rejects.jsonl",
        "tokenizer/size.txt",
    }
    for name in files:
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_every_block_is_in_one_shard_and_other_files_are_not_read(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed = Corpus([corpus.sources[n] for n in (0, 1, 3)], block_bytes=700)
    for one in (corpus, compressed):
        whole = list(one.blocks())
        assert len(whole) > 20
        for count in (1, 2, 5, 64, 1000):
            shards = [list(ShardBlocks(one, Shard(n, count), block_bytes=700)) for n in range(1, count + 1)]
            assert [block for shard in shards for block in shard] == whole
    opened: list[str] = []
    original = Corpus.blocks
    monkeypatch.setattr(Corpus, "blocks", lambda self, **k: opened.append(self.sources[0].name) or original(self, **k))
    list(ShardBlocks(corpus, Shard(1, 100), block_bytes=700))
    assert opened == ["a.jsonl"]


def test_as_many_files_as_shards_are_one_each(tmp_path: Path) -> None:
    """Also where the sizes of the files differ a little."""
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for sizes in ((20, 21, 22), (22, 21, 20), (20, 20, 20)):
        for file, size in zip(files, sizes, strict=True):
            file.write_text("word\n" * size)
        corpus = Corpus(files, block_bytes=1000)
        shards = [list(ShardBlocks(corpus, Shard(number, 3), block_bytes=1000)) for number in (1, 2, 3)]
        assert [[block.file for block in shard] for shard in shards] == [[file] for file in files], sizes


def test_gaps_and_another_order_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        make(corpus, tmp_path, f"s{number}", f"{number}/3")
    for wrong in ([1, 3], [2, 1, 3], [1, 2]):
        with pytest.raises(UserError, match=r"expected the shards 1/\d.* in this order, got"):
            merge([tmp_path / f"s{number}" for number in wrong], tmp_path / "out")
    with pytest.raises(UserError, match=r"shards 1 and 2: expected the second to begin .*\(a:10\), it begins at a:12"):
        check_adjacent(["a:0 to a:10", "a:12 to b:end"])
    check_adjacent(["a:0 to a:10", "a:10 to b:end", "c:0 to c:end"])


def test_a_shard_is_not_confused_with_another(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path, "s", "1/3")
    make(corpus, tmp_path, "s", "1/3")
    with pytest.raises(UserError, match=r"changed: shard \(shard: was '1/3', is now '2/3'\)"):
        make(corpus, tmp_path, "s", "2/3")
    with pytest.raises(UserError, match="changed: shard"):
        make(corpus, tmp_path, "s")


@pytest.mark.parametrize("text", ["3", "0/3", "4/3", "a/b", "1/0", "-1/3", "1/3/4"])
def test_invalid_shards_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--shard: expected a number"):
        Shard.parse(text)


def test_more_shards_than_blocks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    start = time.perf_counter()
    with pytest.raises(UserError, match="expected at least one document, shard 2/2 has none; make fewer shards"):
        make(Corpus([tmp_path / "a.jsonl"]), tmp_path, "s", "2/2")
    assert time.perf_counter() - start < 5
    make(Corpus([tmp_path / "a.jsonl"]), tmp_path, "t", "1/2")
    with pytest.raises(UserError, match="not finished here: run the same command again, which finishes it or says why"):
        merge([tmp_path / "t", tmp_path / "s"], tmp_path / "merged")
