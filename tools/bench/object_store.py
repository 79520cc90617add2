"""How long a run waits for a token store in an object store far away, beside the same store on disk.

    OMP_NUM_THREADS=1 python tools/bench/object_store.py [--latency 0.05] [--megabytes 125] [--tokens 20_000_000]

The object store is simulated: a file system of fsspec on a folder, each of whose requests waits for the latency and
then for its turn on a link of so many megabytes a second. The store is read from disk, from there with an empty cache,
and from there with a cache of a quarter of it, at least 9 MB, in which most rows find nothing.

First, batches of 256 rows of 512 tokens, as a GPU takes them, are read ahead by the loader of training beside a step
that only sleeps: the share of the steps' time for which it waits. Then the same small BERT trains on one CPU thread, in
another order each round: the time between the records of steps, step by step the median of the rounds, and its excess
over disk. The losses of all must be equal. The first step, for which nothing can be read ahead, is named apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from terakoya.components.rows import Layout
from terakoya.components.vocabulary import Vocabulary
from terakoya.launch.here import train
from terakoya.rows.loader import Loader, Prefetcher
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore, open_store
from terakoya.store.writer import write_store
from terakoya_places import cached_store

VOCABULARY = Vocabulary(size=30_000, pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))


class FarFileSystem(LocalFileSystem):
    """A folder behind a link: each request waits `latency` seconds, then `bytes_per_second` for its turn."""

    protocol = "far"
    latency, bytes_per_second = 0.05, 125e6
    requests, moved = 0, 0
    _link = threading.Lock()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        time.sleep(self.latency)
        content: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        with FarFileSystem._link:
            time.sleep(len(content) / self.bytes_per_second)
            FarFileSystem.requests += 1
            FarFileSystem.moved += len(content)
        return content

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return "/" + str(path).removeprefix("far:").lstrip("/")


def moved() -> str:
    """Returns what was asked for and came since the counts were cleared."""
    return f"{FarFileSystem.requests:,} requests, {FarFileSystem.moved / 1e6:,.0f} MB"


def make_store(folder: Path, tokens: int) -> TokenStore:
    """A store of random documents of 20 to 500 tokens."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(20, 500, tokens // 260)
    documents = ([generator.integers(5, 30_000, length)] for length in lengths)
    return write_store(folder, documents, vocabulary=VOCABULARY)


def settings(store: str, *, steps: int) -> dict[str, Any]:
    """A BERT of 11 million parameters, 16 rows of 128 tokens a step."""
    return {
        "data": {"train": [store], "sequence_length": 128},
        "architecture": {
            "type": "bert", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
            "intermediate_size": 1024, "max_position_embeddings": 128,
        },
        "objective": {"type": "masked_lm", "mlm_probability": 0.15, "whole_word_mask": False},
        "optimizer": {"type": "adamw", "learning_rate": 1e-4},
        "schedule": {"type": "constant"},
        "precision": "fp32",
        "batch_size": {"-1": 16},
        "max_steps": steps,
        "logging_steps": 1,
        "checkpoint": {"save_steps": 10 * steps, "model": "never"},
    }  # fmt: skip


def run(raw: Mapping[str, Any], out: Path) -> tuple[list[float], list[float], float]:
    """Trains and returns the losses, the seconds between steps, and the seconds until the first."""
    start = time.time()
    train(raw, out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    times = [line["time"] for line in steps]
    shutil.rmtree(out)
    return [line["loss"] for line in steps], [b - a for a, b in pairwise(times)], times[0] - start


def waits(store: TokenStore, *, steps: int, step_seconds: float, rows: int = 256) -> tuple[float, float]:
    """Returns the share of its time for which a step of `step_seconds`, which only sleeps, waits for `rows` rows of
    512 tokens, and the seconds until the first ones; another thread reads them ahead, as in training."""
    start = time.perf_counter()
    source = RowSource(store, Layout("packed"), sequence_length=512, seed=1)
    loader = Loader([source], [1.0])
    waited, first = 0.0, 0.0
    with Prefetcher(lambda step: loader.load(rows * step, rows * (step + 1)), 0, last_step=steps) as batches:
        for step in range(steps):
            asked = time.perf_counter()
            next(batches)
            if step:
                waited += time.perf_counter() - asked
            else:
                first = time.perf_counter() - start
            time.sleep(step_seconds)
    return waited / ((steps - 1) * step_seconds), first


def main() -> None:
    """Prints a line for each way to read the store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of each request")
    parser.add_argument("--megabytes", type=float, default=125, help="of the link in a second")
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    fsspec.register_implementation("far", FarFileSystem)
    FarFileSystem.latency, FarFileSystem.bytes_per_second = given.latency, given.megabytes * 1e6
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store = make_store(folder / "store", given.tokens)
        size = sum(facts.size for facts in store.facts.data_files.values())
        others = sum(facts.size for facts in store.facts.files.values()) - size
        quarter = (others + max(size / 4, 9e6)) / 1e9
        print(f"{size / 1e6:,.0f} MB in {size >> 17:,} blocks; {given.latency:g} s a request, {given.megabytes:g} MB/s")
        ways = {"disk": (str(folder / "store"), 100.0), "far, empty cache": (f"far:/{folder}/store", 100.0),
                "far, small cache": (f"far:/{folder}/store", quarter)}  # fmt: skip
        for name, (address, limit) in ways.items():
            os.environ["XDG_CACHE_HOME"], os.environ[cached_store.LIMIT_VARIABLE] = str(folder / "cache"), str(limit)
            for step_seconds in (0.4, 0.2, 0.1):
                FarFileSystem.requests = FarFileSystem.moved = 0
                opened = open_store(Path(address))
                share, first = waits(opened, steps=60, step_seconds=step_seconds)
                del opened
                print(
                    f"a step of {step_seconds:g} s that sleeps, {name:18} waits {100 * share:5.1f} %, first after "
                    f"{first:.2f} s; {moved()}",
                    flush=True,
                )
                shutil.rmtree(folder / "cache", ignore_errors=True)
        run(settings(str(folder / "store"), steps=3), folder / "warm")
        seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
        begins: dict[str, list[float]] = {name: [] for name in ways}
        losses: dict[str, list[float]] = {}
        for number in range(given.rounds):
            order = list(ways)[number % 3 :] + list(ways)[: number % 3]
            for name in order:
                os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
                os.environ[cached_store.LIMIT_VARIABLE] = str(ways[name][1])
                FarFileSystem.requests = FarFileSystem.moved = 0
                losses[name], between, begin = run(settings(ways[name][0], steps=given.steps), folder / "run")
                seconds[name].append(between)
                begins[name].append(begin)
                print(
                    f"  round {number + 1}: {name}: {sum(between):.2f} s for {len(between)} steps, first after "
                    f"{begin:.2f} s; {moved()}"
                )
                shutil.rmtree(folder / "cache", ignore_errors=True)
        disk = [statistics.median(each) for each in zip(*seconds["disk"], strict=True)]
        for name in ways:
            assert losses[name] == losses["disk"], f"{name}: other losses"
            mine = [statistics.median(each) for each in zip(*seconds[name], strict=True)]
            more = 100 * (sum(mine) / sum(disk) - 1)
            print(f"{name:18} {1e3 * statistics.mean(mine):7.1f} ms a step ({more:+.1f} %), first step after "
                  f"{statistics.median(begins[name]):.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
