"""Whole-word masking: batches a second beside Transformers' collator, on the same rows, in one interleaved run.

    python tools/bench/masking.py --corpus LINES.jsonl.gz --tokenizer TOKENIZER_FOLDER

The peer is `DataCollatorForLanguageModeling(whole_word_mask=True)`, which makes a batch of examples in memory: lists
of ids and offsets, with a gap before each word, which is how it tells words apart. Ours is the objective's `collate`,
which makes a batch of rows in memory; `mask` is its main part. Both once more with their reading: ours reads the rows
from the token store, the peer's lists are made from arrays. Exits with 1 below the goal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lines
import numpy as np
import torch
import transformers
from transformers import DataCollatorForLanguageModeling

from terakoya import plugins
from terakoya.components.rows import Layout, Rows
from terakoya.distributed import cpu_allocator
from terakoya.rows.row_source import RowSource
from terakoya.toolkit.masking import MaskedRows, Masking, mask

GOAL = 100.0
PEER = "DataCollatorForLanguageModeling"
READING_PEER = f"making lists + {PEER}"
PROBABILITY = 0.15


def main() -> int:
    """Prints a table of medians. Returns the exit status."""
    arguments = _arguments()
    torch.set_num_threads(1)
    cpu_allocator.keep_freed_memory()  # as training does; both sides gain
    warnings.simplefilter("ignore")  # the peer's: it asks for fast tokenizers and replaces nothing by random tokens
    transformers.logging.set_verbosity_error()
    length, size = arguments.sequence_length, arguments.batch_size
    data = lines.read(arguments.corpus, arguments.tokenizer, count=arguments.lines, sequence_length=length)
    vocabulary = data.vocabulary
    with tempfile.TemporaryDirectory() as temporary:
        source = RowSource(data.store(Path(temporary) / "store"), Layout("packed"), sequence_length=length, seed=0)
        assert len(source) >= size, "too few lines for one batch"
        batches = [np.arange(first, first + size) % len(source) for first in range(0, arguments.batches * size, size)]
        peer = DataCollatorForLanguageModeling(data.tokenizer, mlm_probability=PROBABILITY, whole_word_mask=True)
        objective = plugins.load().component("objectives", "masked_lm")(mlm_probability=PROBABILITY)
        loaded = [source.load(0, positions) for positions in batches]
        ready = [examples_of(rows, vocabulary.is_special) for rows in loaded]

        def read(number: int) -> Any:
            return source.load(0, batches[number])

        def masked(rows: Rows, *, budgeted: bool = True) -> MaskedRows:
            maskable = ~vocabulary.is_special.take(rows.tokens)
            rule = Masking(PROBABILITY, budgeted)
            return mask(rows.tokens, rows.word_starts, maskable, rows.keys, vocabulary, rule)

        ways: dict[str, Callable[[int], Any]] = {
            PEER: lambda number: peer([dict(each) for each in ready[number]]),
            "mask": lambda number: masked(loaded[number]),
            "mask, not budgeted": lambda number: masked(loaded[number], budgeted=False),
            "collate": lambda number: objective.collate(loaded[number], vocabulary),
            READING_PEER: lambda number: peer(examples_of(loaded[number], vocabulary.is_special)),
            "load": read,
            "load + collate": lambda number: objective.collate(read(number), vocabulary),
        }
        seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
        for round_ in range(arguments.rounds + 1):
            for name, way in ways.items():
                times = [_timed(way, number) for number in range(len(batches))]
                if round_:  # the first warms up
                    seconds[name].append(times)
        count = masked(loaded[0]).count
        labels = peer([dict(each) for each in ready[0]])["labels"]
    print(
        f"{size} x {length} tokens, {len(source)} rows, transformers {transformers.__version__}, one thread; "
        f"masked: ours {count / (size * length):.3f}, peer {(labels != -100).float().mean():.3f}\n"
    )
    print("| way | CPU ms a batch (median) | batches/s | ratio (median of rounds) |\n|---|---|---|---|")
    ratios = {}
    for name, rounds in seconds.items():
        medians = [statistics.median(times) for times in rounds]
        slow = [statistics.median(times) for times in seconds[READING_PEER if "load" in name else PEER]]
        middle = statistics.median(medians)
        ratios[name] = statistics.median(a / b for a, b in zip(slow, medians, strict=True))
        print(f"| {name} | {1000 * middle:.3f} | {1 / middle:,.0f} | {ratios[name]:.1f} |")
    reached = ratios["collate"] >= GOAL
    print(f"\ncollate: {ratios['collate']:.0f}x, goal {GOAL:.0f}x: {'reached' if reached else 'MISSED'}")
    return 0 if reached else 1


def examples_of(rows: Rows, is_special: np.ndarray) -> list[dict[str, Any]]:
    """Rows as the peer wants them: contiguous offsets inside a word and a gap before the next."""
    assert rows.word_starts is not None
    gaps = np.cumsum((rows.word_starts | is_special[rows.tokens]).astype(int) + 1, axis=1)
    examples = []
    for tokens, ends in zip(rows.tokens, gaps, strict=True):
        examples.append(
            {
                "input_ids": tokens.tolist(),
                "special_tokens_mask": is_special[tokens].astype(int).tolist(),
                "offset_mapping": [(end - 1, end) for end in ends.tolist()],
            }
        )
    return examples


def _timed(way: Callable[[int], Any], number: int) -> float:
    """CPU seconds of this process, so that neighbours on the machine count less."""
    began = time.process_time()
    way(number)
    return time.process_time() - began


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl[.gz] with a field text, or lines of text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer's folder")
    parser.add_argument("--lines", type=int, default=4000, help="how many lines are drawn")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=20, help="batches of each way in a round")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
