"""A text on its way to words, and where its characters were before it was normalised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from terakoya_tokenizer.added_tokens import Segment
from terakoya_tokenizer.mecab import MecabSplitter
from terakoya_tokenizer.normalization import nfkc_spans
from terakoya_tokenizer.word_cache import MARK


class PlainText:
    """A text without added tokens.

    Attributes:
        normal: the text as MeCab reads it: up to its first NUL, and normalised.
        words: its words, with spaces between them.
    """

    def __init__(self, text: str, normal: str, words: str) -> None:
        self._text = text.partition("\0")[0]
        self.normal, self.words = normal, words

    def character_positions(self) -> list[int]:
        """Returns the position in `normal` of each character of the words. MeCab leaves white space out."""
        positions: list[int] = []
        end = 0
        for word in self.words.split(" "):
            begin = self.normal.index(word.replace("\0", " "), end)
            end = begin + len(word)
            positions += range(begin, end)
        return positions

    def origins(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns for each character of `normal` the position of the first character of the text that it comes from,
        and the position after the last one; None where each comes from the character at its own position."""
        spans = nfkc_spans(self._text) if self.normal != self._text else None
        return None if spans is None else (np.array(spans[0], np.int64), np.array(spans[1], np.int64))


class SegmentedText:
    """A text with added tokens, each of which is a word; see `PlainText`."""

    def __init__(self, segments: Sequence[Segment], splitter: MecabSplitter) -> None:
        self._segments = segments
        self._texts: list[PlainText | None] = []
        words = []
        for segment in segments:
            if segment.token is not None:
                self._texts.append(None)
                words.append(f"{MARK}{segment.token}")
            else:
                normal = splitter.normalize(segment.text.partition("\0")[0])
                words += splitter.split([normal])
                self._texts.append(PlainText(segment.text, normal, words[-1]))
        self.normal = "".join(self._normals())
        self.words = " ".join(filter(None, words))

    def _normals(self) -> list[str]:
        """Returns each segment as MeCab reads it."""
        pairs = zip(self._segments, self._texts, strict=True)
        return [segment.text if text is None else text.normal for segment, text in pairs]

    def character_positions(self) -> list[int]:
        """Returns the position in `normal` of each character of the words."""
        positions: list[int] = []
        start = 0
        for text, normal in zip(self._texts, self._normals(), strict=True):
            places = range(len(normal)) if text is None else text.character_positions()
            positions += [start + place for place in places]
            start += len(normal)
        return positions

    def origins(self) -> tuple[np.ndarray, np.ndarray]:
        """See `PlainText.origins`."""
        starts, stops = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for segment, text in zip(self._segments, self._texts, strict=True):
            places = np.array(segment.positions, np.int64)
            if text is None or (origins := text.origins()) is None:
                places = places[: len(places) if text is None else len(text.normal)]
                starts.append(places)
                stops.append(places + 1)
            else:
                firsts, lasts = origins
                starts.append(places[firsts])
                stops.append(places[lasts - 1] + 1)
        return np.concatenate(starts), np.concatenate(stops)
