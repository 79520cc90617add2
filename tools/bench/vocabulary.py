"""How much of our vocabulary is what the field's own method gives, and how fast it is made.

    python tools/bench/vocabulary.py CORPUS.jsonl.gz... --dictionary ipadic

The field's method: `MeCab -Owakati` over the NFKC text into files, one a process, then
`tokenizers.BertWordPieceTokenizer` over them. It breaks ties by a hash table's order, so it is run twice: two of its
own runs differ as well. Ours is run from nothing and from a kept table of word counts. Exits with 1 below a goal.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fugashi
from tokenizers import BertWordPieceTokenizer

from terakoya.corpus.corpus import Block, Corpus, Document
from terakoya.toolkit.tokenizers.mecab import dictionary_options
from terakoya.toolkit.tokenizers.wordpiece import ALPHABET
from terakoya_corpus.count_words import save_word_counts
from terakoya_plugins.tokenizers.mecab_wordpiece import SPECIAL_TOKENS, MecabWordPiece

GOALS = {"in common": 0.997, "from nothing": 1.5, "from the kept table": 5.0}


def write_wakati(corpus: Corpus, dictionary: str, folder: Path, processes: int) -> list[Path]:
    """Every line of `corpus` as MeCab's words with spaces between them, in one file a process."""
    blocks = list(corpus.blocks())
    shares = [blocks[number::processes] for number in range(processes)]
    files = [folder / f"wakati-{number}.txt" for number in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_write_share, [corpus] * processes, [dictionary] * processes, shares, files))
    return files


def _write_share(corpus: Corpus, dictionary: str, blocks: Sequence[Block], out: Path) -> None:
    tagger = fugashi.GenericTagger(dictionary_options(dictionary, "-Owakati"))
    with out.open("w", encoding="utf-8") as file:
        for block in blocks:
            for item in corpus.read(block):
                if isinstance(item, Document):
                    for line in item.text.split("\n"):
                        file.write(tagger.parse(unicodedata.normalize("NFKC", line)) + "\n")


def field_vocabulary(files: Sequence[Path], settings: MecabWordPiece) -> set[str]:
    """The vocabulary of `tokenizers` over wakati text."""
    tokenizer = BertWordPieceTokenizer(handle_chinese_chars=False, strip_accents=False, lowercase=False)
    tokenizer.train(
        [str(file) for file in files],
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        limit_alphabet=settings.limit_alphabet or ALPHABET,
        special_tokens=[*SPECIAL_TOKENS, *(f"[unused{number}]" for number in range(settings.num_unused_tokens))],
        show_progress=False,
    )
    return set(tokenizer.get_vocab())


def main() -> int:
    """Trains both ways and prints a table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="+", type=Path)
    parser.add_argument("--dictionary", default="ipadic")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    corpus = Corpus(options.corpus)
    settings = MecabWordPiece(dictionary=options.dictionary, vocab_size=options.vocab_size)
    seconds: dict[str, list[float]] = {"from nothing": [], "from the kept table": [], "the field's": []}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        kept = settings.model_copy(update={"counts": scratch / "counts"})
        words = {"type": "mecab_wordpiece", "dictionary": options.dictionary}
        save_word_counts(options.corpus, scratch / "counts", settings=words)
        fields: list[set[str]] = []
        for round_ in range(options.rounds):
            for name, tokenizer in (("from nothing", settings), ("from the kept table", kept)):
                began = time.perf_counter()
                facts = tokenizer.train(corpus, scratch / f"{name}-{round_}", processes=options.processes)
                seconds[name].append(time.perf_counter() - began)
            began = time.perf_counter()
            files = write_wakati(corpus, options.dictionary, scratch, options.processes)
            fields.append(field_vocabulary(files, settings))
            seconds["the field's"].append(time.perf_counter() - began)
        if len(fields) < 2:
            fields.append(field_vocabulary(files, settings))
        texts = {(scratch / f"{name}-{r}/vocab.txt").read_text("utf-8") for name in seconds if name != "the field's"
                 for r in range(options.rounds)}  # fmt: skip
        assert len(texts) == 1, "the same vocabulary, from the kept table too"
        ours = set(texts.pop().split("\n")[:-1])
    field, again = fields[:2]
    common = len(ours & field) / len(field)
    print(f"command: python {' '.join(sys.argv)}")
    print(f"{facts['words']:,} words, {facts['distinct_words']:,} distinct; count error {facts['count_error']}\n")
    print("| vocabularies | pieces | in common |")
    print("|---|---:|---:|")
    print(f"| ours, the field's | {len(ours):,} | {common:.3%} |")
    print(f"| ours, the field's second run | {len(ours):,} | {len(ours & again) / len(again):.3%} |")
    print(f"| the field's, its second run | {len(field):,} | {len(field & again) / len(field):.3%} |")
    print(f"\n| way, {options.processes} processes | seconds (median of {options.rounds}) | the field's is |")
    print("|---|---|---|")
    reached = common >= GOALS["in common"]
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["the field's"], times, strict=True))
        reached &= ratio >= GOALS.get(name, 0)
        print(f"| {name} | {statistics.median(times):.1f} | {ratio:.2f} x |")
    print(f"\ngoals {GOALS}: {'reached' if reached else 'MISSED'}")
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
