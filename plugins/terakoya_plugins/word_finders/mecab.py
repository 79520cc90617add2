"""The words of Japanese text, found with MeCab (https://taku910.github.io/mecab/)."""

from __future__ import annotations

import importlib.metadata
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from terakoya import hookimpl
from terakoya.components import FindWords, WordFinder
from terakoya.toolkit.tokenizers import mecab
from terakoya_tokenizer.normalization import nfkc_spans

NAME = "mecab"


class Mecab(WordFinder):
    """MeCab's words. It reads line by line, as the tokenizer `mecab_wordpiece` does."""

    dictionary: str = "unidic_lite"
    """The dictionary: `ipadic`, `unidic_lite`, `unidic`, or the folder of a compiled MeCab dictionary."""
    mecab_option: str = ""
    """Further options for MeCab, such as `-u USER.dic`."""
    normalize_text: bool = True
    """Whether MeCab reads the text in Unicode's form NFKC, for which the dictionaries are made. The positions of words
    are those in the text as it is."""

    def build(self) -> FindWords:
        """Implements `WordFinder.build`."""
        splitter = mecab.build_splitter(self._options(), normalize=self.normalize_text)

        def find(texts: Sequence[str]) -> list[np.ndarray]:
            clean = [text.replace("\0", " ") for text in texts]  # at which MeCab stops
            normal = [splitter.lines(text) for text in clean]
            words = iter(splitter.split([line for lines in normal for line in lines]))
            return [_spans(text.split("\n"), lines, words) for text, lines in zip(clean, normal, strict=True)]

        return find

    def fingerprint(self) -> Mapping[str, str]:
        """Implements `WordFinder.fingerprint`."""
        return {
            "dictionary": mecab.options_fingerprint(self._options()),
            "fugashi": importlib.metadata.version("fugashi"),
            "unicode": unicodedata.unidata_version,
        }

    def _options(self) -> str:
        folder = mecab.dictionary_folder(self.dictionary)
        return f"{mecab.dictionary_options(folder)} {self.mecab_option}".strip()


def _spans(lines: Sequence[str], normal: Sequence[str], words: Iterator[str]) -> np.ndarray:
    """Returns the words of a text, (W, 2). `words` yields those of each of its `lines`, which are `normal` in NFKC."""
    starts: list[int] = []
    stops: list[int] = []
    at = 0
    for line, normal_line in zip(lines, normal, strict=True):
        begins, ends = _positions(normal_line, next(words).split())
        if normal_line != line and (origins := nfkc_spans(line)) is not None:
            begins, ends = [origins[0][begin] for begin in begins], [origins[1][end - 1] for end in ends]
        starts += [at + begin for begin in begins]
        stops += [at + end for end in ends]
        at += len(line) + 1
    return np.array([starts, stops], np.int64).T


def _positions(line: str, words: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns where each of `words` begins and ends in `line`."""
    ends = list(accumulate(map(len, words)))
    if ends and ends[-1] == len(line):  # nothing is between the words
        return [0, *ends[:-1]], ends
    begins, ends, end = [], [], 0
    for word in words:
        begin = line.index(word, end)
        end = begin + len(word)
        begins.append(begin)
        ends.append(end)
    return begins, ends


@hookimpl
def register_word_finders() -> Mapping[str, type[WordFinder]]:
    """Registers `mecab`."""
    return {NAME: Mecab}
