"""MeCab + WordPiece: ours against Transformers' BertJapaneseTokenizer, the same ids, on one process and on two.

    python tools/bench/encode.py CORPUS.jsonl.gz... --tokenizer FOLDER --megabytes 50

Rounds are interleaved: in each, Transformers encodes a part of a slice of the corpus and ours the whole slice. A rate
is bytes of UTF-8 text a second, by the wall; processes are started and warm before. Wherever both encoded a document,
the ids are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from terakoya.components import Encoder
from terakoya.corpus.corpus import Corpus, Document
from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece

TASK_BYTES = 1_000_000
WARM_UP = "寺子屋で読み書きを習う。"


@dataclass(frozen=True)
class Done:
    """One task's result: a hash of all ids, how many, and the seconds that hashing took (not to be counted)."""

    digest: str
    tokens: int
    hashing: float


Encode = Callable[[Sequence[str]], np.ndarray]
_encode: Encode | None = None


def transformers_encode(folder: Path) -> Encode:
    """All ids of documents, line by line, from Transformers."""
    import logging

    tokenizer = MecabWordPiece().load(folder)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # "longer than the maximum sequence length"

    def encode(documents: Sequence[str]) -> np.ndarray:
        lines = [line for text in documents for line in text.split("\n")]
        ids = tokenizer(lines, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
        return ids["input_ids"]

    return encode


def our_encode(folder: Path) -> Encode:
    """All ids of documents from the plugin."""
    encoder: Encoder = MecabWordPiece().encoder(folder)
    return lambda documents: encoder.encode(documents).ids


def start(make: Callable[[Path], Encode], folder: Path) -> None:
    """Makes this process ready for `task`."""
    global _encode
    _encode = make(folder)
    _encode([WARM_UP])


def task(documents: Sequence[str]) -> Done:
    """Encodes `documents`."""
    assert _encode is not None
    ids = _encode(documents)
    began = time.perf_counter()
    flat = np.fromiter(chain.from_iterable(ids), np.int32) if isinstance(ids, list) else ids.astype(np.int32)
    digest = hashlib.sha256(flat.tobytes()).hexdigest()
    return Done(digest, len(flat), time.perf_counter() - began)


def wait(_: int) -> None:
    """Keeps a process busy for a moment, so that another one is started."""
    time.sleep(0.2)


class Side:
    """One way to encode, in warm processes of its own."""

    def __init__(self, make: Callable[[Path], Encode], folder: Path, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=start, initargs=(make, folder))
        self._processes = processes
        list(self._pool.map(wait, range(8 * processes)))
        self.rates: list[float] = []
        self.token_rates: list[float] = []

    def run(self, tasks: Sequence[Sequence[str]]) -> list[str]:
        """Encodes all tasks, notes the rate, returns the hashes."""
        began = time.perf_counter()
        done = list(self._pool.map(task, tasks))
        seconds = time.perf_counter() - began - sum(each.hashing for each in done) / self._processes
        self.rates.append(sum(len(text.encode()) for texts in tasks for text in texts) / seconds / 1e6)
        self.token_rates.append(sum(each.tokens for each in done) / seconds / 1e3)
        return [each.digest for each in done]

    def close(self) -> None:
        """Ends the processes."""
        self._pool.shutdown()


def read(sources: Sequence[Path], limit: int) -> list[str]:
    """Documents of about `limit` bytes, evenly taken from the whole corpus; fewer bytes if there are no more."""
    corpus = Corpus(sources)
    documents = [item.text for block in corpus.blocks() for item in corpus.read(block) if isinstance(item, Document)]
    sizes = [len(text.encode()) for text in documents]
    share = min(1.0, limit / sum(sizes))
    kept: list[str] = []
    seen = taken = 0
    for text, size in zip(documents, sizes, strict=True):
        seen += size
        if taken + size <= share * seen:
            taken += size
            kept.append(text)
    return kept


def tasks_of(documents: Sequence[str]) -> list[list[str]]:
    """`documents` in tasks of about `TASK_BYTES`."""
    tasks: list[list[str]] = [[]]
    size = 0
    for text in documents:
        if size >= TASK_BYTES:
            tasks.append([])
            size = 0
        tasks[-1].append(text)
        size += len(text.encode())
    return tasks


def main() -> None:
    """Runs the comparison and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="+", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=50, help="text that ours encodes")
    parser.add_argument("--peer-megabytes", type=float, default=15, help="part of it that Transformers encodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()

    documents = read(options.corpus, int(options.megabytes * 1e6))
    tasks = tasks_of(documents)
    total = sum(len(text.encode()) for text in documents) / 1e6
    share = min(1.0, options.peer_megabytes / total)
    print(f"command: python {' '.join(sys.argv)}")
    print(
        f"{total:.1f} MB in {len(documents):,} documents; Transformers on {share:.0%} of each slice; {options.rounds} "
        f"interleaved rounds, medians; transformers {version('transformers')}, fugashi {version('fugashi')}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| processes | BertJapaneseTokenizer MB/s | ours MB/s | ours k tokens/s | ratio | ids |")
    print("|---:|---:|---:|---:|---:|---|")
    for processes in options.processes:
        peer = Side(transformers_encode, options.tokenizer, processes)
        ours = Side(our_encode, options.tokenizer, processes)
        for number in range(options.rounds):
            whole = tasks[number :: options.rounds]
            part = whole[: max(processes, round(share * len(whole)))]
            expected = peer.run(part)
            if ours.run(whole)[: len(part)] != expected:
                sys.exit("the ids differ")
        peer.close()
        ours.close()
        theirs, mine = statistics.median(peer.rates), statistics.median(ours.rates)
        tokens = statistics.median(ours.token_rates)
        print(f"| {processes} | {theirs:.2f} | {mine:.2f} | {tokens:,.0f} | {mine / theirs:.2f}x | identical |")


if __name__ == "__main__":
    main()
