"""The words of Japanese text, found with MeCab (https://taku910.github.io/mecab/).

MeCab's own analysis takes most of the time. What comes after it is done for all texts of a batch at once: the
characters of MeCab's words are those of the text, white space aside, in the same order.

Letters: C characters, W words.
"""

from __future__ import annotations

import importlib.metadata
import unicodedata
from collections.abc import Mapping, Sequence

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
        splitter = mecab.build_splitter(self._options(), normalize=self.normalize_text)

        def find(texts: Sequence[str]) -> list[np.ndarray]:
            clean = [text.replace("\0", " ") for text in texts]  # at which MeCab stops
            normal = [splitter.normalize(text) for text in clean]
            words = splitter.split([line for text in normal for line in text.split("\n")])
            spans = _spans(normal, words)
            return [
                each if before is after else _in_original(each, before, after)
                for each, before, after in zip(spans, clean, normal, strict=True)
            ]

        return find

    def fingerprint(self) -> Mapping[str, str]:
        return {
            "dictionary": mecab.options_fingerprint(self._options()),
            "fugashi": importlib.metadata.version("fugashi"),
            "unicode": unicodedata.unidata_version,
        }

    def _options(self) -> str:
        return mecab.dictionary_options(self.dictionary, self.mecab_option)


def _spans(texts: Sequence[str], words: Sequence[str]) -> list[np.ndarray]:
    """Returns the words of each of `texts`, (W, 2). `words` are those of each line of all texts, spaced."""
    text_starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    read, written = _characters(texts), _characters(words)
    places = np.flatnonzero(~_is_space(read))
    spaces = np.append(True, _is_space(written))
    is_character = ~spaces[1:]
    assert np.array_equal(read[places], written[is_character]), "MeCab's words are not the text's"
    is_first = spaces[:-1][is_character]
    is_last = np.append(is_first[1:], True)
    spans = np.stack([places[is_first], places[is_last] + 1], axis=1) if len(places) else np.empty((0, 2), np.int64)
    ends = np.searchsorted(spans[:, 0], text_starts)
    return [spans[begin:end] - start for begin, end, start in zip(ends[:-1], ends[1:], text_starts[:-1], strict=True)]


def _characters(texts: Sequence[str]) -> np.ndarray:
    """Returns the code points of `texts` with a line end after each, (C,)."""
    return np.frombuffer("".join(f"{text}\n" for text in texts).encode("utf-32-le"), np.uint32)


_SPACES = np.array([chr(code).isspace() for code in range(0x3002)])
"""Whether a code point is white space; the last one is U+3000."""


def _is_space(characters: np.ndarray) -> np.ndarray:
    return _SPACES[np.minimum(characters, len(_SPACES) - 1)]


def _in_original(spans: np.ndarray, text: str, normal: str) -> np.ndarray:
    """Returns `spans` of `normal` as those of `text`, of which it is the form NFKC. Words that share a character of the
    text, as those of U+337F, become one."""
    starts: list[np.ndarray] = []
    stops: list[np.ndarray] = []
    at = done = 0
    for line, normal_line in zip(text.split("\n"), normal.split("\n"), strict=True):
        if line != normal_line and (origins := nfkc_spans(line)) is not None:
            same = np.arange(done, at)
            starts += [same, np.array(origins[0]) + at]
            stops += [same + 1, np.array(origins[1]) + at]
            done = at + len(line)
        at += len(line) + 1
    if not starts:
        return spans
    rest = np.arange(done, len(text))
    start, stop = np.concatenate([*starts, rest]), np.concatenate([*stops, rest + 1])
    begin, end = start[spans[:, 0]], stop[spans[:, 1] - 1]
    apart = begin[1:] >= end[:-1]
    is_first, is_last = np.append(True, apart)[: len(spans)], np.append(apart, True)[: len(spans)]
    return np.stack([begin[is_first], end[is_last]], axis=1)


@hookimpl
def register_word_finders() -> Mapping[str, type[WordFinder]]:
    return {NAME: Mecab}
