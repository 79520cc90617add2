"""The encoder beside MeCab itself: seconds for the same text on one process each, in turns.

    python tools/bench/ceiling.py CORPUS.jsonl.gz --tokenizer WORDPIECE_FOLDER [--megabytes N]

`mecab`: the program (Debian: apt-get install mecab) with `-Owakati` and the tokenizer's own dictionary, reading a file
of NFKC-normalised lines, its start subtracted. `fugashi`: `parse` of the same lines, the words thrown away. `encoder`:
normalisation, words, pieces, ids and word starts, from text to arrays, with empty caches in each round; once as it is,
all and beyond the text after which it compiles and orders its tables, and once as it is without a C compiler. Exits
with 1 where the ids or word starts of these differ, or the goal is missed. Times are CPU time of the process, so that a
neighbour costs less than it would by the wall.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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
from terakoya_tokenizer import mecab as splitting
from terakoya_tokenizer import word_cache

MANY = 1 << 60
ENCODER, BEYOND, WITHOUT = "encoder", "encoder, beyond the first text", "encoder without a C compiler"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("corpus", nargs="+", type=Path, help="jsonl[.gz] with a field text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder of kind mecab_wordpiece")
    parser.add_argument("--dictionary", default="unidic_lite", help="the one that the tokenizer names")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--goal", type=float, default=1.7, help="times the speed without a C compiler")
    options = parser.parse_args(arguments)

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

    beyond = next((number for number, size in enumerate(_characters(tasks)) if size > splitting.MECAB_CHARACTERS), 0)
    later = sum(len(text.encode()) for task in tasks[beyond + 1 :] for text in task) / 1e6

    def encode() -> tuple[list[float], str]:
        """Returns the seconds of each task, and a hash of all ids and word starts."""
        encoder = MecabWordPiece().encoder(options.tokenizer)
        seconds, total = [], hashlib.sha256()
        for task in tasks:
            began = time.process_time()
            encoded = encoder.encode(task)
            seconds.append(time.process_time() - began)
            assert encoded.word_starts is not None
            total.update(encoded.ids.tobytes() + encoded.word_starts.tobytes())
        return seconds, total.hexdigest()

    def compare() -> dict[str, float]:
        quick, digest = encode()
        limits = splitting.MECAB_CHARACTERS, word_cache._MANY
        splitting.MECAB_CHARACTERS = word_cache._MANY = MANY
        slow, other = encode()
        splitting.MECAB_CHARACTERS, word_cache._MANY = limits
        if digest != other:
            raise SystemExit("ids or word starts differ")
        return {ENCODER: sum(quick), BEYOND: sum(quick[beyond + 1 :]), WITHOUT: sum(slow)}

    ways: dict[str, Callable[[], float]] = {
        "fugashi, parse alone": lambda: _parse(words, lines),
        "normalisation alone": normalise,
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
        seconds: dict[str, list[float]] = {name: [] for name in (*ways, ENCODER, BEYOND, WITHOUT)}
        for _ in range(options.rounds):
            for name, way in ways.items():
                seconds[name].append(way())
            for name, spent in compare().items():
                seconds[name].append(spent)
    print(
        f"{megabytes:.1f} MB of text in {len(lines):,} lines, one process each, medians of {options.rounds}; "
        f"load {os.getloadavg()[0]:.1f}\n"
    )
    if not later:
        del seconds[BEYOND]
    ours = BEYOND if later else ENCODER
    rates = {
        name: [(later if name == BEYOND else megabytes) / each for each in taken] for name, taken in seconds.items()
    }
    ratio = 0.0
    print(f"| way | CPU seconds | MB/s | {ours}: ratio |\n|---|---:|---:|---:|")
    for name, taken in seconds.items():
        ratio = statistics.median(mine / rate for mine, rate in zip(rates[ours], rates[name], strict=True))
        print(f"| {name} | {statistics.median(taken):.2f} | {statistics.median(rates[name]):.2f} | {ratio:.2f} x |")
    print(f"\nequal ids and word starts; {ratio:.2f} x the speed without a C compiler, goal {options.goal} x")
    return int(ratio < options.goal)


def _characters(tasks: Sequence[Sequence[str]]) -> list[int]:
    """Returns the number of characters up to the end of each task."""
    return list(itertools.accumulate(sum(map(len, task)) for task in tasks))


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
