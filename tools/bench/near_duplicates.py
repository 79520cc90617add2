"""Near-duplicates of synthetic documents: what is found, the time beside datatrove, the memory at growing sizes.

    python tools/bench/near_duplicates.py --work DIR                         all of it, half an hour or so
    python tools/bench/near_duplicates.py --work DIR --documents 100000

One document in ten is a copy of an earlier one with another end, or with single characters changed; the Jaccard
similarity of their sets of 5 characters is counted exactly. datatrove gets characters as words, so that both compare
the same n-grams (its own Japanese words need spaCy), and takes turns with ours, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

LEVELS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
AT = 0.8
NEAR = 0.01
WIDTH = 5
COPIES = 10  # one document in so many is a copy
PART = 20_000
HUNDRED_MILLION = 10**8


class Copy(NamedTuple):
    """A document that is like an earlier one: its number, and the Jaccard similarity."""

    number: int
    similarity: float


def main() -> int:
    """Prints the tables; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the documents and all that is made")
    parser.add_argument(
        "--documents",
        type=int,
        default=1_000_000,
        help="of the corpus without datatrove; sketches for up to 4 times as many follow",
    )
    parser.add_argument("--beside", type=int, default=20_000, help="documents that datatrove also gets")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="that make the sketches of the corpus")
    parser.add_argument("--measure", choices=("plan", "join"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measured = measure_plan(arguments.work, arguments.processes) if arguments.measure == "plan" else None
        print(json.dumps(measured or measure_join(arguments.work)))
        return 0
    arguments.work.mkdir(parents=True, exist_ok=True)
    misses = compare(arguments.work, arguments.beside, arguments.turns)
    misses += make_whole(arguments.work, arguments.documents, arguments.processes)
    misses += grow(arguments.work, arguments.documents)
    print("\n".join(misses))
    return 1 if misses else 0


# -------------------------------------------------------------------------------------------------------- documents


def write_documents(file: Path, count: int) -> list[Copy]:
    """Writes `count` documents as jsonl. Returns which of them are copies."""
    random = np.random.default_rng(0)
    texts = _texts(random)
    earlier: list[str] = []
    copies: list[Copy] = []
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            text = next(texts)
            if number % COPIES == COPIES - 1:
                place = int(random.integers(len(earlier)))
                level = LEVELS[len(copies) % len(LEVELS)]
                original, text = earlier[place], _change(earlier[place], text, level, random)
                copies.append(Copy(number, jaccard(original, text)))
            elif len(earlier) < 20_000:
                earlier.append(text)
            elif random.random() < 0.1:  # originals are all over the corpus, and few have many copies
                earlier[int(random.integers(len(earlier)))] = text
            stream.write(f'{{"text": "{text}"}}\n')
    return copies


def _texts(random: np.random.Generator) -> Iterator[str]:
    """Yields texts of words from one list, some frequent and most rare, as in a language; 250 characters each or so."""
    letters = np.array([chr(code) for code in [*range(0x3042, 0x3092), *range(0x4E00, 0x5600)]])
    words = np.array(["".join(random.choice(letters, size)) for size in random.integers(1, 5, 50_000)])
    shares = np.cumsum(1 / np.arange(10, len(words) + 10))
    while True:
        sizes = np.clip(random.lognormal(4.4, 0.6, 1000), 20, 1000).astype(int)
        chosen = words[np.searchsorted(shares, random.random(sizes.sum()) * shares[-1])]
        for part in np.split(chosen, np.cumsum(sizes)[:-1]):
            yield "".join(part.tolist())


def _change(original: str, other: str, level: float, random: np.random.Generator) -> str:
    changed = round(len(original) * (1 - level) / (1 + level))  # n-grams of this many, in both of the two texts
    if random.random() < 0.5:
        tail = (other * (changed // len(other) + 1))[:changed]
        return original[: len(original) - changed] + tail
    letters = list(original)
    for place in random.choice(len(letters) // WIDTH, min(changed, len(letters)) // WIDTH, replace=False):
        letters[place * WIDTH + 2] = other[place % len(other)]
    return "".join(letters)


def jaccard(one: str, other: str) -> float:
    """The exact similarity of two texts."""
    first, second = ({text[place : place + WIDTH] for place in range(len(text) - WIDTH + 1)} for text in (one, other))
    return len(first & second) / len(first | second)


# ------------------------------------------------------------------------------------------------------ what is found


def report(name: str, dropped: set[int], copies: list[Copy], count: int) -> tuple[float, float]:
    """Prints the share that is dropped at each similarity. Returns it at 0.8, and the share of false ones."""
    cells = []
    at = 0.0
    for level in LEVELS:
        near = [copy for copy in copies if abs(copy.similarity - level) < NEAR]
        share = sum(copy.number in dropped for copy in near) / max(1, len(near))
        at = share if level == AT else at
        cells.append(f"{level:g}: {100 * share:.2f} % of {len(near):,}")
    numbers = {copy.number for copy in copies}
    false = len(dropped - numbers) / (count - len(numbers))
    print(f"{name}: dropped at {', '.join(cells)}; {100 * false:.4f} % of documents that are no copies", flush=True)
    return at, false


def compare(work: Path, count: int, turns: int) -> list[str]:
    """Prints what both find and the time that both take. Returns the goals that are missed."""
    folder = work / "beside"
    folder.mkdir(exist_ok=True)
    copies = write_documents(folder / "corpus.jsonl", count)
    seconds: dict[str, list[float]] = {"ours": [], "datatrove": []}
    found: dict[str, set[int]] = {}
    for turn in range(turns + 1):
        for name, find in (("ours", ours), ("datatrove", datatrove)):
            shutil.rmtree(work / name, ignore_errors=True)
            start = time.process_time()
            found[name] = find(folder, work / name)
            if turn:  # the first warms up
                seconds[name].append(time.process_time() - start)
    at, false = report("ours", found["ours"], copies, count)
    report("datatrove", found["datatrove"], copies, count)
    own, peer = (statistics.median(seconds[name]) for name in ("ours", "datatrove"))
    print(f"{count:,} documents: {own:.2f} s, datatrove {peer:.2f} s of CPU time: {peer / own:.1f} x", flush=True)
    goals = {"recall of 0.95": at >= 0.95, "0.1 % false ones": false <= 0.001, "2 x datatrove": peer >= 2 * own}
    return [f"missed: {goal}" for goal, met in goals.items() if not met]


def ours(folder: Path, work: Path) -> set[int]:
    """Returns the numbers of the documents that the step drops."""
    plan(folder / "corpus.jsonl", work, processes=1)
    return dropped(work)


def plan(file: Path, work: Path, *, processes: int) -> None:
    """Makes the plan of a cleaning with the step near_duplicates."""
    from terakoya.corpus.corpus import Corpus
    from terakoya_cleaning.plan import add_cleaning, make_plan
    from terakoya_cleaning.reading import parse_steps

    make_plan(
        add_cleaning(Corpus([file]), parse_steps([{"type": "near_duplicates"}], source=""), work), processes=processes
    )


def dropped(work: Path) -> set[int]:
    """The numbers from 0 of the documents that a plan drops."""
    return set((np.fromfile(work / "dropped.u8", "<u8") - np.uint64(1)).tolist())


def datatrove(folder: Path, work: Path) -> set[int]:
    """Returns the numbers of the documents that datatrove's MinHash with default settings drops."""
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature, minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.logging import logger

    logger.disable("datatrove")
    try:
        config = minhash.MinhashConfig(n_grams=WIDTH)
    except ImportError:  # xxhash is missing
        config = minhash.MinhashConfig(n_grams=WIDTH, hash_config=HashConfig(hash_fc="sha1"))
    places = [str(work / name) for name in ("signatures", "pairs", "clusters")]
    minhash.load_word_tokenizer = lambda language: Characters()
    signatures = MinhashDedupSignature(places[0], config)
    signatures.run(JsonlReader(str(folder), doc_progress=False).run())
    for bucket in range(config.num_buckets):
        MinhashDedupBuckets(places[0], places[1], config=config, lines_to_buffer=-1).run(
            None, bucket, config.num_buckets
        )
    MinhashDedupCluster(places[1], places[2], config=config, lines_to_buffer=-1).run()
    return set(np.fromfile(work / "clusters" / "000000.remove", "<u4").tolist())


class Characters:
    """A word tokenizer for datatrove whose words are characters."""

    def word_tokenize(self, text: str) -> list[str]:
        """The characters of `text`."""
        return list(text)


# ------------------------------------------------------------------------------------------------------------ growth


def make_whole(work: Path, count: int, processes: int) -> list[str]:
    """Makes the plan of a corpus, prints what is found and what it takes. Returns the goals that are missed."""
    folder = work / "whole"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    copies = write_documents(folder / "corpus.jsonl", count)
    row = in_new_process("plan", folder, processes)
    at, false = report(f"{count:,} documents", dropped(folder / "clean"), copies, count)
    print(
        f"{count:,} documents: sketches {row['sketches']:.1f} s on {processes} processes, "
        f"{row['disk'] / 2**20:,.0f} MiB, joined in {row['join']:.1f} s ({row['cpu']:.1f} s of CPU time) with "
        f"{row['peak'] / 2**20:,.0f} MiB of memory beyond the {row['before'] / 2**20:,.0f} MiB before",
        flush=True,
    )
    goals = {"recall of 0.95": at >= 0.95, "0.1 % false ones": false <= 0.001}
    return [f"missed: {goal}" for goal, met in goals.items() if not met]


def grow(work: Path, smallest: int) -> list[str]:
    """Prints memory and time of joining random sketches, at three sizes, and by growth at 10^8. Returns the goals that
    are missed."""
    rows: list[dict[str, Any]] = []
    for count in (smallest, 2 * smallest, 4 * smallest):
        folder = work / "sketches"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_sketches(folder, count)
        rows.append({"count": count, **in_new_process("join", folder, 1)})
        row = rows[-1]
        print(
            f"{count:,} sketches: joined in {row['join']:.1f} s ({row['cpu']:.1f} s of CPU time) with "
            f"{row['peak'] / 2**20:,.0f} MiB of memory beyond the {row['before'] / 2**20:,.0f} MiB before, "
            f"{row['dropped']:,} dropped",
            flush=True,
        )
    last, before = rows[-1], rows[-2]
    slope = (last["peak"] - before["peak"]) / (last["count"] - before["count"])
    peak = last["peak"] + slope * (HUNDRED_MILLION - last["count"])
    seconds = last["join"] * HUNDRED_MILLION / last["count"]
    print(
        f"by growth, not seen: 10^8 documents are joined with {peak / 2**30:.1f} GiB ({slope:.1f} bytes a document), "
        f"in {seconds / 3600:.1f} hours while the disk is as fast as here"
    )
    return [] if slope <= 64 else ["missed: 64 bytes a document"]


def write_sketches(folder: Path, count: int) -> None:
    """Writes random sketches in parts of a plan: one in ten has nine tenths of the values of one of the part before."""
    from terakoya_cleaning.notes import save_array

    random = np.random.default_rng(0)
    earlier = None
    for start in range(0, count, PART):
        part = random.integers(0, 1 << 64, (min(PART, count - start), 64), np.uint64)
        if earlier is not None:
            values = part[: len(part) // COPIES].view("u1")
            same = random.random(values.shape) < 0.9
            values[same] = earlier[-len(values) :].view("u1")[same]
        save_array(folder / f"{start:020d}.note0", part)
        earlier = part


def in_new_process(what: str, folder: Path, processes: int) -> dict[str, Any]:
    """Returns what `measure_plan` or `measure_join` returns."""
    command = [sys.executable, __file__, "--work", str(folder), "--measure", what, "--processes", str(processes)]
    facts: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return facts


def measure_plan(folder: Path, processes: int) -> dict[str, float]:
    """Makes a plan. Returns seconds, bytes of memory before duplicates are searched and those that this adds, and bytes
    of sketches on disk."""
    from terakoya_cleaning import plan as planning

    facts: dict[str, float] = {}
    write_plan = planning._write_plan

    def measured(cleaning: Any, parts: Path, key: str) -> None:
        facts["sketches"] = time.perf_counter() - start
        facts["disk"] = sum(file.stat().st_size for file in parts.iterdir())
        with measuring(facts):
            write_plan(cleaning, parts, key)

    planning._write_plan = measured
    start = time.perf_counter()
    plan(folder / "corpus.jsonl", folder / "clean", processes=processes)
    return facts


def measure_join(folder: Path) -> dict[str, float]:
    """Joins sketches. Returns seconds, bytes of memory before and those that this adds, and how many are dropped."""
    from terakoya_cleaning.near_duplicates import Layout, find_near_duplicates
    from terakoya_cleaning.notes import ArraysOnDisk

    facts: dict[str, float] = {}
    notes = ArraysOnDisk(folder, ".note0")
    left = np.ones(sum(map(len, notes)), bool)
    with measuring(facts):
        found = find_near_duplicates(notes, left, Layout.of(0.8, 512), progress=notes.progress)
    return {**facts, "dropped": len(found)}


@contextmanager
def measuring(facts: dict[str, float]) -> Iterator[None]:
    """Adds to `facts` the seconds `join` and `cpu`, and the bytes of memory `before` and `peak`, the most beyond it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is then as large as what is used now
    facts["before"] = _memory("VmHWM")
    start, cpu = time.perf_counter(), time.process_time()
    yield
    facts.update(
        join=time.perf_counter() - start, cpu=time.process_time() - cpu, peak=_memory("VmHWM") - facts["before"]
    )


def _memory(name: str) -> int:
    """A figure of /proc/self/status. Unit: bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


if __name__ == "__main__":
    sys.exit(main())
