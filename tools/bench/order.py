"""How soon the order of a thousand million tokens of rows is there, and in how much memory.

    python tools/bench/order.py --peer PYTHON_WITH_DATASETS

Ours opens a token store and gives the first and a far batch of shuffled rows, in a process of its own, for layout
`stream` and for layout `packed` with its plan built before (the building is timed apart). The peer joins and cuts the
same documents with `datasets`' map in batches of 1,000, as Transformers' language modelling examples do; it is given
a hundredth of the documents, and its time is for those. Exits with 1 above the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

GOAL_SECONDS, GOAL_MIB = 1.0, 200.0
SEQUENCE_LENGTH = 512
SHARE_OF_PEER = 100

OURS = """
import json, resource, sys, time
import numpy as np
from pathlib import Path
from terakoya.rows.row_source import Layout, RowSource
from terakoya.store.token_store import TokenStore
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
source = RowSource(TokenStore.open(Path(sys.argv[1])), Layout(sys.argv[2]), sequence_length=int(sys.argv[3]), seed=0)
opened = time.perf_counter() - began
source.load(0, np.arange(32))
source.load(3, np.arange(len(source) - 32, len(source)))
print(json.dumps({"rows": len(source), "opened": opened, "seconds": time.perf_counter() - began,
                  "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "before": before / 1024}))
"""

PEER = """
import json, resource, sys, tempfile, time
import numpy as np
import datasets
datasets.disable_progress_bars()
lengths, size = np.load(sys.argv[1]), int(sys.argv[2])
def examples():
    for length in lengths.tolist():
        yield {"input_ids": [7] * length}
def join_and_cut(batch):
    joined = [token for document in batch["input_ids"] for token in document]
    whole = len(joined) // size * size
    return {"input_ids": [joined[at : at + size] for at in range(0, whole, size)]}
with tempfile.TemporaryDirectory() as cache:
    table = datasets.Dataset.from_generator(examples, cache_dir=cache)
    began = time.perf_counter()
    rows = table.map(join_and_cut, batched=True, batch_size=1000)
    shuffled = rows.shuffle(seed=0)
    shuffled[0]
    print(json.dumps({"rows": len(rows), "seconds": time.perf_counter() - began,
                      "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def main() -> int:
    """Prints a table. Returns the exit status."""
    from terakoya.components.vocabulary import Vocabulary
    from terakoya.store.writer import write_store

    arguments = _arguments()
    vocabulary = Vocabulary(size=32768, pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))
    lengths = document_lengths(arguments.tokens)
    missed = False
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary) / "store"
        ids = np.full(int(lengths.max()), 7, np.uint16)

        def documents() -> Iterator[list[np.ndarray]]:
            for length in lengths.tolist():
                yield [ids[:length]]

        write_store(folder, documents(), vocabulary=vocabulary, unit="document")
        print(f"{lengths.sum():,} tokens in {len(lengths):,} documents, rows of {SEQUENCE_LENGTH}\n")
        print("| way | rows | seconds until the first rows | peak memory, MiB |\n|---|---|---|---|")
        began = time.perf_counter()
        _run(OURS, folder, "packed", SEQUENCE_LENGTH)
        planned = time.perf_counter() - began
        for layout in ("stream", "packed"):
            runs = [_run(OURS, folder, layout, SEQUENCE_LENGTH) for _ in range(arguments.rounds)]
            seconds = sorted(run["seconds"] for run in runs)[len(runs) // 2]
            memory = max(run["mib"] for run in runs)
            missed |= seconds > GOAL_SECONDS or memory > GOAL_MIB
            print(f"| {layout} | {runs[0]['rows']:,} | {seconds:.3f} | {memory:.0f} |")
        print(f"| packed, the first time | {runs[0]['rows']:,} | {planned:.1f} | |")
        if arguments.peer:
            file = Path(temporary) / "lengths.npy"
            np.save(file, lengths[: len(lengths) // SHARE_OF_PEER])
            run = _run(PEER, file, SEQUENCE_LENGTH, python=arguments.peer)
            print(f"| datasets map, a hundredth of it | {run['rows']:,} | {run['seconds']:.1f} | {run['mib']:.0f} |")
    print(f"\ngoal {GOAL_SECONDS} s, {GOAL_MIB:.0f} MiB: {'MISSED' if missed else 'reached'}")
    return int(missed)


def document_lengths(tokens: int) -> np.ndarray:
    """Lengths (n,) int64 of documents as they are in the wild, most short and a few very long, of `tokens` in all."""
    random = np.random.default_rng(0)
    drawn = np.exp(random.normal(5.6, 1.1, size=tokens // 300)).astype(np.int64) + 1
    return drawn[: int(np.searchsorted(drawn.cumsum(), tokens)) + 1]


def _run(program: str, *arguments: object, python: str = sys.executable) -> dict[str, float]:
    """What `program` prints as JSON, run in a process of its own."""
    done = subprocess.run(
        [python, "-c", program, *map(str, arguments)],
        check=True, text=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where 3 GB for the store can lie for a while")
    parser.add_argument("--peer", help="a Python that has the library datasets; without it ours alone is measured")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
