"""What `prepare --words` adds to `prepare`: CPU time in turns, and the time of MeCab alone.

    python tools/bench/prepare_words.py CORPUS.jsonl.gz --tokenizer FOLDER [--tokenizer FOLDER ...] --documents 2000

Each turn prepares the first documents of the corpus in this process, first without words, then with them, and MeCab's
own analysis of the same lines is timed, from strings to strings, without anything that is made of it. `bound` is the
ratio that would be left if nothing else took time: no alignment can be quicker. Ids are compared. Prints a table; the
exit status is 1 if ids differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from prepare_turns import plain

from terakoya import prepare
from terakoya.components import WordFinder
from terakoya.preparation.word_borders import FOUND, INSIDE, find_word_finder
from terakoya.store.token_store import StoreFacts
from terakoya.toolkit.tokenizers import mecab
from terakoya_plugins.word_finders.mecab import Mecab


def main() -> int:
    """Prints a table. Returns the exit status."""
    arguments = _arguments()
    words = json.loads(arguments.words) if arguments.words.startswith("{") else arguments.words
    differ = False
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        corpus = work / "corpus.jsonl"
        megabytes = plain(arguments.corpus, corpus, documents=arguments.documents)
        finder = find_word_finder(words).finder
        print(f"{megabytes:.1f} MB; {finder!r}")
        print(f"{'tokenizer':20} {'plain':>8} {'words':>8} {'alone':>8} {'ratio':>6} {'bound':>6} borders found")
        for number, tokenizer in enumerate(arguments.tokenizer):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            alone: list[float] = []
            for turn in range(arguments.rounds):
                alone.append(_time_alone(corpus, finder))
                for with_words in (False, True):
                    out = work / f"{number}-{turn}-{with_words}"
                    began = time.process_time()
                    facts = prepare(
                        [corpus], tokenizer=tokenizer, out=out, processes=1, words=words if with_words else None
                    )
                    seconds[with_words].append(time.process_time() - began)
                ids = [work / f"{number}-{turn}-{with_words}" / "tokens.bin" for with_words in (False, True)]
                differ |= ids[0].read_bytes() != ids[1].read_bytes()
            slow, quick, least = (statistics.median(each) for each in (seconds[True], seconds[False], alone))
            print(
                f"{tokenizer.name:20} {quick:6.2f} s {slow:6.2f} s {least:6.2f} s {slow / quick:6.2f} "
                f"{(quick + least) / quick:6.2f} {_share(facts):11.2f} %",
                flush=True,
            )
    if differ:
        print("the ids differ", file=sys.stderr)
    return int(differ)


def _time_alone(corpus: Path, finder: WordFinder) -> float:
    """Returns the seconds of CPU time that MeCab takes to split the lines of `corpus`, or another finder as a whole."""
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    if isinstance(finder, Mecab):
        splitter = mecab.build_splitter(mecab.dictionary_options(finder.dictionary, finder.mecab_option))
        lines = [line for text in texts for line in splitter.lines(text)]
        began = time.process_time()
        splitter.split(lines)
        return time.process_time() - began
    find = finder.build()
    began = time.process_time()
    find(texts)
    return time.process_time() - began


def _share(facts: StoreFacts) -> float:
    found, inside = facts.notes[FOUND], facts.notes[INSIDE]
    return 100 * found / (found + inside)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path, help="a jsonl.gz file with a field text")
    parser.add_argument("--tokenizer", type=Path, action="append", required=True, help="a folder; may be repeated")
    parser.add_argument("--words", default="mecab", help="as for `terakoya prepare`")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
