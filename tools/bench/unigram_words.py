"""How near a unigram model over MeCab's dictionary comes to MeCab: the share of lines that both divide alike.

    python tools/bench/unigram_words.py CORPUS.jsonl.gz... --lines 10000

A `tokenizer.json` can hold a unigram model, whose words have one score each. Here these are the words of unidic-lite
with MeCab's word costs, less one constant for each word in the place of the costs of neighbours; the constant is the
best of several on the first tenth of the lines. White space is left out, since it always divides words.
"""

from __future__ import annotations

import argparse
import itertools
import struct
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import unidic_lite
from fast_tokenizer import read_lines
from tokenizers import Tokenizer, models

from terakoya_tokenizer.mecab import MecabSplitter, dictionary_options

CONSTANTS = (0, 500, 1000, 2000, 3000, 4000, 6000, 8000, 12000)


def read_costs(file: Path) -> dict[str, int]:
    """Returns the words of MeCab's compiled dictionary with their lowest costs: a double array (Darts), whose values
    are places in an array of entries."""
    content = file.read_bytes()
    *_, array_bytes, entry_bytes, _features, _ = struct.unpack("<10I", content[:40])
    units = np.frombuffer(content, np.dtype([("base", "<i4"), ("check", "<u4")]), array_bytes // 8, 72)
    base, check = units["base"].astype(np.int64), units["check"].astype(np.int64)
    kind = np.dtype([("left", "<u2"), ("right", "<u2"), ("pos", "<u2"), ("cost", "<i2"), ("f", "<u4"), ("c", "<u4")])
    costs = np.frombuffer(content, kind, entry_bytes // 16, 72 + array_bytes)["cost"].astype(np.int64)
    found: dict[str, int] = {}
    nodes, names = np.array([base[0]]), [b""]
    while len(nodes):
        ends = (check[nodes] == nodes) & (base[nodes] < 0)
        for number in np.flatnonzero(ends).tolist():
            value = -int(base[nodes[number]]) - 1
            first, count = value >> 8, value & 0xFF
            found[names[number].decode()] = int(costs[first : first + count].min())
        following, longer = [], []
        for byte in range(256):
            places = np.minimum(nodes + byte + 1, len(base) - 1)
            for number in np.flatnonzero(check[places] == nodes).tolist():
                following.append(int(base[places[number]]))
                longer.append(names[number] + bytes([byte]))
        nodes, names = np.array(following, np.int64), longer
    return found


def build(costs: dict[str, int], constant: int) -> Tokenizer:
    """Returns the unigram model."""
    scale = 1000.0  # unknown characters cost 10 more than the dearest word
    vocabulary = [("\0", 0.0), *((word, -(cost + constant) / scale) for word, cost in costs.items() if word)]
    return Tokenizer(models.Unigram(vocabulary, 0, False))


def share(tokenizer: Tokenizer, lines: Iterable[str], words: Iterable[str]) -> float:
    """Returns the share of lines that are divided into `words`, which are joined by spaces."""
    pairs = [(tokenizer.encode(line), expected) for line, expected in zip(lines, words, strict=True)]
    return sum(
        expected.split(" ") == [line[start:stop] for start, stop in each.offsets]
        for (each, expected), line in zip(pairs, lines, strict=True)
    ) / len(pairs)


def main() -> None:
    """Prints the share of equal lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="+", type=Path)
    parser.add_argument("--lines", type=int, default=10_000)
    options = parser.parse_args()
    source = ("".join(unicodedata.normalize("NFKC", line).split()) for line in read_lines(options.corpus))
    lines = [*itertools.islice(filter(None, source), options.lines)]
    folder = Path(unidic_lite.DICDIR)
    words = MecabSplitter(dictionary_options(folder)).split(lines)
    costs = read_costs(folder / "sys.dic")
    tenth = len(lines) // 10
    shares = {each: share(build(costs, each), lines[:tenth], words[:tenth]) for each in CONSTANTS}
    best = max(shares, key=lambda each: shares[each])
    rest = share(build(costs, best), lines[tenth:], words[tenth:])
    print(f"command: python {' '.join(sys.argv)}")
    print(f"{len(costs):,} words; {', '.join(f'{each}: {value:.1%}' for each, value in shares.items())}")
    print(f"constant {best}: {rest:.1%} of {len(lines) - tenth:,} lines divided as MeCab does")


if __name__ == "__main__":
    main()
