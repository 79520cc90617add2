"""The fast tokenizer beside Transformers' BertJapaneseTokenizer: the same ids on every line, and how much faster.

    python tools/bench/fast_tokenizer.py CORPUS.jsonl.gz... --tokenizer FOLDER --lines 1000000

Lines are divided behind each 。, so that they are near the length of a sentence. Both encode batches of lines in turn,
in one process, as a user would: special tokens, attention mask, and from ours offsets. MeCab alone, which returns words
and no ids, is the most that any of them can reach. Ours is asked for ids and for
offsets in turns first, because new words of a batch cost the first one more. A rate is lines a second of processor
time, which other programs on the machine change less than time by the clock. The ids of every line are compared, and
the part of the text that a token stands for, normalised, with the token.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import statistics
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from transformers import BertJapaneseTokenizer

from terakoya.corpus.corpus import Corpus, Document
from terakoya_tokenizer import BertJapaneseTokenizerFast
from terakoya_tokenizer.mecab import MecabSplitter, mecab_options


def read_lines(sources: Sequence[Path]) -> Iterator[str]:
    """Yields the sentences of all documents."""
    corpus = Corpus(sources)
    for block in corpus.blocks():
        for item in corpus.read(block):
            if isinstance(item, Document):
                for line in item.text.split("\n"):
                    yield from (part for part in line.replace("。", "。\n").split("\n") if part)


def timed(encode: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `encode` and its seconds of processor time, without the garbage of those before."""
    gc.collect()
    began = time.process_time()
    result = encode()
    return result, time.process_time() - began


def wrong_spans(lines: Sequence[str], encoded: Any, tokenizer: Any) -> int:
    """Returns the number of tokens, unknown ones apart, that differ from the normalised part of the text."""
    wrong = 0
    for number, line in enumerate(lines):
        for token, (start, stop) in zip(encoded.tokens(number), encoded["offset_mapping"][number], strict=True):
            if start == stop:
                wrong += token not in tokenizer.all_special_tokens
            elif token != tokenizer.unk_token:
                normal = [unicodedata.normalize("NFKC", each) for each in line[start:stop]]
                part, piece = unicodedata.normalize("NFKC", line[start:stop]), token.removeprefix("##")
                grows = max(map(len, normal)) > 1  # such as …, of which a token may be a part
                wrong += part != piece and not (grows and piece in part)
    return wrong


def main() -> None:
    """Runs the comparison and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="+", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1000, help="lines in a call")
    options = parser.parse_args()

    logging.getLogger("transformers").setLevel(logging.ERROR)  # "longer than the maximum sequence length"
    slow = BertJapaneseTokenizer.from_pretrained(options.tokenizer, trust_remote_code=False)
    fast = BertJapaneseTokenizerFast.from_pretrained(options.tokenizer, trust_remote_code=False)
    for tokenizer in (slow, fast):
        tokenizer(["寺子屋で読み書きを習う。"])
    gc.freeze()
    print(f"command: python {' '.join(sys.argv)}")
    ratios: dict[str, list[float]] = {"ids": [], "ids and offsets": []}
    alone: list[float] = []
    mecab = MecabSplitter(mecab_options(slow.mecab_kwargs or {}))
    lines = tokens = wrong = 0
    differing: list[str] = []
    batch: list[str] = []
    for line in read_lines(options.corpus):
        batch.append(line)
        if len(batch) < options.batch:
            continue
        theirs, seconds = timed(lambda batch=batch: slow(batch))
        found = {}
        for what in sorted(ratios, reverse=len(ratios["ids"]) % 2 == 1):
            offsets = what == "ids and offsets"
            found[what], mine = timed(lambda batch=batch, offsets=offsets: fast(batch, return_offsets_mapping=offsets))
            ratios[what].append(seconds / mine)
        ids, ours = found["ids"], found["ids and offsets"]
        normals = list(map(mecab.normalize, batch))
        alone.append(seconds / timed(lambda normals=normals: mecab.split(normals))[1])
        expected = theirs["input_ids"]
        differing += [
            line
            for line, one, two, three in zip(batch, expected, ids["input_ids"], ours["input_ids"], strict=True)
            if not one == two == three
        ]
        wrong += wrong_spans(batch, ours, fast)
        lines, tokens = lines + len(batch), tokens + sum(map(len, expected))
        if lines >= options.lines:
            break
        batch = []
    print(
        f"{lines:,} lines, {tokens:,} tokens in batches of {options.batch:,}; {len(differing):,} lines with other ids, "
        f"{wrong:,} tokens with other spans; transformers {version('transformers')}, fugashi {version('fugashi')}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| returned | times BertJapaneseTokenizer's rate, median of the batches (quartiles) |")
    print("|---|---|")
    for what, values in {**ratios, "words, by MeCab alone": alone}.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"| {what} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    if differing or wrong:
        sys.exit(f"for example: {differing[:3]}")


if __name__ == "__main__":
    main()
