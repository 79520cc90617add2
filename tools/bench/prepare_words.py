"""What `prepare --words` adds to `prepare`: CPU time in turns, and the time of MeCab alone.

    python tools/bench/prepare_words.py CORPUS.jsonl.gz --tokenizer FOLDER [--tokenizer FOLDER ...] --documents 2000

Each turn prepares the first documents of the corpus in this process, first without words, then with them. Ids are
compared. The last column is what MeCab takes to read the same text: less than that cannot be added. Prints a table; the
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
from terakoya.preparation.word_borders import FOUND, INSIDE, find_word_finder
from terakoya.store.token_store import StoreFacts


def main() -> int:
    """Prints a table. Returns the exit status."""
    arguments = _arguments()
    words = json.loads(arguments.words) if arguments.words.startswith("{") else arguments.words
    differ = False
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        corpus = work / "corpus.jsonl"
        megabytes = plain(arguments.corpus, corpus, documents=arguments.documents)
        alone = _time_words(corpus, words)
        print(f"{megabytes:.1f} MB; {arguments.words} alone: {alone:.1f} s of CPU time")
        print(f"{'tokenizer':40} {'plain':>8} {'words':>8} {'ratio':>6} {'borders found':>14}")
        for number, tokenizer in enumerate(arguments.tokenizer):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(arguments.rounds):
                for with_words in (False, True):
                    out = work / f"{number}-{turn}-{with_words}"
                    began = time.process_time()
                    facts = prepare(
                        [corpus], tokenizer=tokenizer, out=out, processes=1, words=words if with_words else None
                    )
                    seconds[with_words].append(time.process_time() - began)
                ids = [work / f"{number}-{turn}-{with_words}" / "tokens.bin" for with_words in (False, True)]
                differ |= ids[0].read_bytes() != ids[1].read_bytes()
            slow, quick = statistics.median(seconds[True]), statistics.median(seconds[False])
            print(
                f"{tokenizer.name:40} {quick:6.1f} s {slow:6.1f} s {slow / quick:6.2f} {_share(facts):12.2f} %",
                flush=True,
            )
    if differ:
        print("the ids differ", file=sys.stderr)
    return int(differ)


def _time_words(corpus: Path, words: object) -> float:
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    find = find_word_finder(words).finder.build()  # type: ignore[arg-type]
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
