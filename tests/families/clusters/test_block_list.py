"""A list of blocks without their text gives the blocks again."""

from __future__ import annotations

from pathlib import Path

import pytest

from terakoya.corpus.corpus import Corpus
from terakoya_clusters.preparation.block_list import BlockList


@pytest.mark.parametrize("encoding", ["cp932", "iso2022_jp"])
def test_blocks_of_another_encoding_get_their_bytes_again(encoding: str, tmp_path: Path) -> None:
    text = "header: x\n\n" * 30_000 + "ソフトウェアの能力を表示する。\n\n" * 9
    (tmp_path / "other.txt").write_text(text, encoding=encoding, newline="")
    corpus = Corpus([tmp_path / "other.txt"])
    blocks = list(corpus.blocks(block_bytes=100_000))
    assert blocks[0].data is None and blocks[-1].data is not None
    stripped = BlockList(
        tuple(type(b)(b.file, b.start, b.stop, b.line, b.disk_bytes) for b in blocks),
        tuple(b.data is not None for b in blocks),
        "",
    )
    numbers = range(len(blocks))
    assert [block for _, block in stripped.with_bytes(corpus, numbers, block_bytes=100_000)] == blocks
