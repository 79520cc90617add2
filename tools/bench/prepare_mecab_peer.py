"""The field's way to Megatron's files with MeCab and WordPiece: Transformers' tokenizer in a pool over documents.

    python tools/bench/prepare_mecab_peer.py CORPUS.jsonl TOKENIZER OUT --processes 2

Written as one would write it to be quick: documents go to the workers as raw lines of jsonl in chunks, ids come back as
bytes, in order. A line's ids are `convert_tokens_to_ids(tokenize(line))`, which are those of `tokenizer(line,
add_special_tokens=False)` without the cost of its result object; the fastest of four ways tried. Knows nothing of
terakoya.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

CHUNK = 16
"""Documents a worker is handed at once."""

_tokenizer: Any = None


def load(folder: Path) -> None:
    """Makes this process ready for `encode`."""
    global _tokenizer
    from transformers import AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)  # "longer than the maximum sequence length"
    _tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def encode(row: bytes) -> bytes:
    """The ids of one document, uint16."""
    ids: list[int] = []
    for line in json.loads(row)["text"].split("\n"):
        ids += _tokenizer.convert_tokens_to_ids(_tokenizer.tokenize(line))
    return np.array(ids, np.uint16).tobytes()


def main() -> None:
    """Writes OUT/tokens.bin and OUT/tokens.idx."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--documents", type=int, help="only so many")
    options = parser.parse_args()
    options.out.mkdir()
    lengths: list[int] = []
    with (
        options.corpus.open("rb") as source,
        (options.out / "tokens.bin").open("wb") as target,
        multiprocessing.get_context("spawn").Pool(options.processes, load, (options.tokenizer,)) as pool,
    ):
        rows: Iterator[bytes] = islice(source, options.documents)
        for ids in pool.imap(encode, rows, chunksize=CHUNK):
            target.write(ids)
            lengths.append(len(ids) // 2)
    write_index(options.out / "tokens.idx", np.array(lengths, np.int32))


def write_index(file: Path, lengths: np.ndarray) -> None:
    """Megatron's index of one sequence a document, `lengths` (D,) tokens each of uint16."""
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    with file.open("wb") as target:
        target.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        target.write(lengths.tobytes() + pointers.tobytes() + np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


if __name__ == "__main__":
    main()
