"""How near the encoder comes to MeCab itself: seconds for the same text on one process each, in turns.

    python tools/bench/ceiling.py CORPUS.jsonl.gz --tokenizer WORDPIECE_FOLDER [--megabytes N]

`mecab`: the program (Debian: apt-get install mecab) with `-Owakati` and the tokenizer's own dictionary, reading a file
of NFKC-normalised lines, its start subtracted. `fugashi`: `parse` of the same lines, the words thrown away. `encoder`:
normalisation, words, pieces, ids and word starts, from text to arrays, with empty caches in each round. Times are CPU
time of the process, so that a neighbour costs less than it would by the wall.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from encode import read, tasks_of

from terakoya.toolkit.tokenizers import mecab
from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("corpus", nargs="+", type=Path, help="jsonl[.gz] with a field text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder of kind mecab_wordpiece")
    parser.add_argument("--dictionary", default="unidic_lite", help="the one that the tokenizer names")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    folder = mecab.dictionary_folder(options.dictionary)
    words = mecab.MecabSplitter(mecab.dictionary_options(options.dictionary))
    tasks = tasks_of(read(options.corpus, int(options.megabytes * 1e6)))
    lines = [line for task in tasks for text in task for line in words.lines(text)]
    megabytes = sum(len(text.encode()) for task in tasks for text in task) / 1e6

    def normalise() -> float:
        began = time.process_time()
        for task in tasks:
            for text in task:
                words.lines(text)
        return time.process_time() - began

    def encode() -> float:
        encoder = MecabWordPiece().encoder(options.tokenizer)
        began = time.process_time()
        for task in tasks:
            encoder.encode(task)
        return time.process_time() - began

    ways: dict[str, Callable[[], float]] = {
        "fugashi, parse alone": lambda: _parse(words, lines),
        "normalisation alone": normalise,
        "encoder": encode,
    }
    with tempfile.TemporaryDirectory() as temporary:
        text, nothing = Path(temporary, "text"), Path(temporary, "nothing")
        text.write_text("\n".join(lines) + "\n", encoding="utf-8")
        nothing.write_text("\n", encoding="utf-8")
        if shutil.which("mecab"):
            program = "mecab, the program"
            ways = {program: lambda: _program(folder, text) - _program(folder, nothing), **ways}
        else:
            print("mecab: no such program; left out")
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                seconds[name].append(way())
    print(
        f"{megabytes:.1f} MB of text in {len(lines):,} lines, one process each, medians of {options.rounds}; "
        f"load {os.getloadavg()[0]:.1f}\n"
    )
    print("| way | CPU seconds | MB/s | the encoder's speed is |\n|---|---:|---:|---:|")
    for name, taken in seconds.items():
        share = statistics.median(a / b for a, b in zip(taken, seconds["encoder"], strict=True))
        median = statistics.median(taken)
        print(f"| {name} | {median:.2f} | {megabytes / median:.2f} | {share:.0%} |")


def _parse(words: mecab.MecabSplitter, lines: Sequence[str]) -> float:
    parse = words.parse
    began = time.process_time()
    for line in lines:
        parse(line)
    return time.process_time() - began


def _program(folder: Path, text: Path) -> float:
    """CPU seconds of the program `mecab` over a file."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        ["mecab", "-Owakati", "-d", folder, "-r", "/dev/null", "-b", str(1 << 20), "-o", os.devnull, text], check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
