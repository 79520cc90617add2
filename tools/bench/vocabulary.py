"""How much of our vocabulary is what the field's own method gives, and how fast it is made.

    python tools/bench/vocabulary.py CORPUS.jsonl.gz... --dictionary ipadic

The field's method: `MeCab -Owakati` over the NFKC text into a file, then `tokenizers.BertWordPieceTokenizer` over it.
It breaks ties by a hash table's order, so it is run twice: two of its own runs differ as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fugashi
from tokenizers import BertWordPieceTokenizer

from terakoya.data.corpus import Corpus, Document
from terakoya.data.mecab import dictionary_folder, dictionary_options
from terakoya_plugins.tokenizers.mecab_wordpiece import SPECIAL_TOKENS, MecabWordPiece


def write_wakati(corpus: Corpus, dictionary: str, out: Path) -> None:
    """Every line of `corpus` as MeCab's words with spaces between them."""
    tagger = fugashi.GenericTagger(f"{dictionary_options(dictionary_folder(dictionary))} -Owakati")
    with out.open("w", encoding="utf-8") as file:
        for block in corpus.blocks():
            for item in corpus.read(block):
                if isinstance(item, Document):
                    for line in item.text.split("\n"):
                        file.write(tagger.parse(unicodedata.normalize("NFKC", line)) + "\n")


def field_vocabulary(file: Path, settings: MecabWordPiece) -> set[str]:
    """The vocabulary of `tokenizers` over wakati text."""
    tokenizer = BertWordPieceTokenizer(handle_chinese_chars=False, strip_accents=False, lowercase=False)
    tokenizer.train(
        [str(file)],
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        limit_alphabet=settings.limit_alphabet,
        special_tokens=[*SPECIAL_TOKENS, *(f"[unused{number}]" for number in range(settings.num_unused_tokens))],
        show_progress=False,
    )
    return set(tokenizer.get_vocab())


def main() -> None:
    """Trains both ways and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="+", type=Path)
    parser.add_argument("--dictionary", default="ipadic")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()

    corpus = Corpus(options.corpus)
    settings = MecabWordPiece(dictionary=options.dictionary, vocab_size=options.vocab_size)
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        facts = settings.train(corpus, Path(scratch) / "ours", processes=options.processes)
        our_seconds = time.perf_counter() - began
        ours = set((Path(scratch) / "ours/vocab.txt").read_text(encoding="utf-8").split("\n")[:-1])
        began = time.perf_counter()
        wakati = Path(scratch) / "wakati.txt"
        write_wakati(corpus, options.dictionary, wakati)
        field = field_vocabulary(wakati, settings)
        field_seconds = time.perf_counter() - began
        again = field_vocabulary(wakati, settings)
    print(f"command: python {' '.join(sys.argv)}")
    print(f"{facts['words']:,} words, {facts['distinct_words']:,} distinct; count error {facts['count_error']}\n")
    print("| vocabularies | pieces | in common |")
    print("|---|---:|---:|")
    print(f"| ours, the field's | {len(ours):,} | {len(ours & field) / len(field):.3%} |")
    print(f"| ours, the field's second run | {len(ours):,} | {len(ours & again) / len(again):.3%} |")
    print(f"| the field's, its second run | {len(field):,} | {len(field & again) / len(field):.3%} |")
    print(
        f"\nours {our_seconds:.1f} s on {options.processes} processes; the field's {field_seconds:.1f} s, MeCab on one"
    )


if __name__ == "__main__":
    main()
