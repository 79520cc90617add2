"""Counting the tokens of a store, at 1 x and at 1,000 x, beside tokenizing the text again.

    python tools/bench/count.py CORPUS.jsonl.gz --tokenizer WORDPIECE_FOLDER [--documents N]

Ours is what `terakoya store count` calls, timed within a process (the first call and the median of many), and the
whole command. The store of 1,000 times more sequences and tokens is sparse: counting reads record, headers and sizes,
so what would be in the files does not matter. The peer counts the ids of each line as the field's counting scripts do,
with Transformers' tokenizer in one process, its start not counted. Exits with 1 above the goal or where counts differ.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from prepare_turns import plain

from terakoya.atomic_files import dump_hashed_json
from terakoya.corpus.corpus import Corpus, Document
from terakoya.preparation.prepare import prepare
from terakoya.store.document_sizes import FILE, SIZES
from terakoya.store.token_store import CHECKSUMS, IDX_HEADER, IDX_MAGIC, Counts, TokenStore, count_store

GOAL = 1e-3
TIMES = 1000
CALLS = 501


def main() -> int:
    """Prints a table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path, help="a jsonl.gz file with a field text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer's folder")
    parser.add_argument("--documents", type=int, default=1000, help="only the first so many")
    parser.add_argument("--rounds", type=int, default=5, help="of the whole command")
    parser.add_argument("--folder", help="where some MB can lie for a while")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        work = Path(temporary)
        corpus = work / "corpus.jsonl"
        megabytes = plain(options.corpus, corpus, documents=options.documents)
        prepare([corpus], tokenizer=options.tokenizer, out=work / "store", processes=1)
        seconds, tokens = tokenized_again(corpus, options.tokenizer)
        small = count_store(work / "store")
        large = enlarge(work / "store", work / "large", small)
        same = tokens == small.tokens and numbers(count_store(large)) == [TIMES * each for each in numbers(small)]
        print(f"{megabytes:.1f} MB of jsonl: {numbers(small)}; counts {'agree' if same else 'DIFFER'}\n")
        print("| way | tokens | first call, ms | median call, ms | whole command, s |\n|---|---|---|---|---|")
        print(f"| tokenizing again | {tokens:,} | | {seconds * 1e3:,.0f} | |")
        worst = 0.0
        for name, folder, held in (("store", work / "store", small), (f"store x {TIMES:,}", large, count_store(large))):
            calls = [timed(folder) for _ in range(CALLS)]
            worst = max(worst, statistics.median(calls))
            whole = statistics.median(command(folder) for _ in range(options.rounds))
            print(
                f"| {name} | {held.tokens:,} | {calls[0] * 1e3:.3f} | {statistics.median(calls) * 1e3:.3f} "
                f"| {whole:.2f} |"
            )
    missed = worst > GOAL or not same
    print(f"\ngoal {GOAL * 1e3:g} ms: {'MISSED' if missed else 'reached'}")
    return int(missed)


def timed(folder: Path) -> float:
    """Seconds of one count."""
    began = time.perf_counter()
    count_store(folder)
    return time.perf_counter() - began


def command(folder: Path) -> float:
    """Seconds of the whole command."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "terakoya", "store", "count", folder], check=True, stdout=subprocess.PIPE)
    return time.perf_counter() - began


def numbers(counts: Counts) -> list[int]:
    """Returns the documents, sequences and tokens."""
    return [counts.documents, counts.sequences, counts.tokens]


def enlarge(store: Path, folder: Path, small: Counts) -> Path:
    """A store that holds `TIMES` times more than `store` and no content: its record, header, sizes and the ends of its
    index are true, all between is a hole."""
    folder.mkdir()
    facts = TokenStore.open(store).facts
    sequences, documents, tokens = small.sequences * TIMES, small.documents * TIMES, small.tokens * TIMES
    large = facts.model_copy(update={"sequences": sequences, "documents": documents, "tokens": tokens})
    (folder / "store.json").write_bytes(dump_hashed_json(large.model_dump(mode="json")))
    shutil.copy(store / CHECKSUMS, folder)
    itemsize = np.dtype(facts.dtype).itemsize
    with (store / "tokens.idx").open("rb") as stream:
        _, version, code, _, _ = IDX_HEADER.unpack(stream.read(IDX_HEADER.size))
    with (folder / "tokens.idx").open("wb") as stream:
        stream.write(IDX_HEADER.pack(IDX_MAGIC, version, code, sequences, documents + 1))
        stream.seek(IDX_HEADER.size + 4 * (sequences - 1))
        stream.write(np.array([1], "<i4").tobytes())  # the last length, its place, and where documents end
        stream.seek(IDX_HEADER.size + 12 * sequences - 8)
        stream.write(np.array([(tokens - 1) * itemsize], "<i8").tobytes())
        stream.seek(IDX_HEADER.size + 12 * sequences + 8 * documents)
        stream.write(np.array([sequences], "<i8").tobytes())
    sizes = {"tokens.bin": tokens * itemsize, "tokens.words": (tokens + 7) // 8, FILE: documents * 2 * SIZES.itemsize}
    for name, size in sizes.items():
        with (folder / name).open("wb") as stream:
            stream.truncate(size)
    return folder


def tokenized_again(corpus: Path, tokenizer: Path) -> tuple[float, int]:
    """Seconds and tokens of counting by tokenizing."""
    from transformers import AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)  # "longer than the maximum sequence length"
    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
    source = Corpus([corpus])
    texts = [each.text for block in source.blocks() for each in source.read(block) if isinstance(each, Document)]
    began = time.perf_counter()
    tokens = sum(
        len(loaded(line, add_special_tokens=False)["input_ids"]) for text in texts for line in text.split("\n")
    )
    return time.perf_counter() - began, tokens


if __name__ == "__main__":
    sys.exit(main())
