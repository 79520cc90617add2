"""Which characters of a text each piece stands for, exact for any normalisation.

Letters: T pieces of all texts, N texts, C normalised characters of all texts with one position more for each text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SPACE = "\u2581"
"""What SentencePiece writes for a space, and before a text."""


def piece_spans(processor: Any, texts: Sequence[str], pieces: Sequence[int], lengths: np.ndarray) -> np.ndarray:
    """Returns the first character of each piece in its text and the one after its last, (T, 2).

    `processor` is SentencePiece's; `pieces` (N,) are the numbers of each text, `lengths` (T,) the number of normalised
    characters of each piece. A piece of length 0 is a further byte of the character before it. A space before the text
    that only the model sees comes from the first character.
    """
    characters = np.fromiter(map(len, texts), np.int64, len(texts))
    text_starts = np.cumsum(characters) - characters + np.arange(len(texts))
    sizes, flat = text_origins(processor, texts)
    flat += np.repeat(text_starts, sizes)
    of_piece = np.repeat(np.arange(len(texts)), pieces)
    stops = np.cumsum(lengths)
    assert np.array_equal(np.append(0, stops)[np.cumsum(pieces)], np.cumsum(sizes - 1)), (
        "the pieces do not add up to the texts"
    )
    last = stops - 1 + of_piece  # each text has one origin more than characters
    begin = np.minimum(last + 1 - lengths, last)
    is_next = np.diff(flat, prepend=-1) > 0  # the first of all that come from the same character
    following = np.append(flat[is_next], np.iinfo(np.int64).max)
    ends = text_starts + characters
    stop = np.minimum(following[np.cumsum(is_next)[last]], ends[of_piece])
    return np.stack([flat[begin], stop], axis=1) - text_starts[of_piece][:, None]


def text_origins(processor: Any, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of normalised characters of each text and one more, (N,), and for each text the position from
    which each of them comes and the position after all, (C,).

    SentencePiece is asked for positions only where it changes more than spaces, as that takes three times as long.
    """
    normal = processor.normalize(texts)
    sizes = np.fromiter(map(len, normal), np.int64, len(texts)) + 1
    added = np.zeros(len(texts), np.int64)
    changed = []
    for number, (text, after) in enumerate(zip(texts, normal, strict=True)):
        spaced = text.replace(" ", SPACE)
        if after == SPACE + spaced:
            added[number] = 1
        elif after != spaced or SPACE in (after[:1], after[-1:]):  # which may be removed and added
            changed.append(number)
    starts = np.cumsum(sizes) - sizes
    origins = np.maximum(np.arange(sizes.sum()) - np.repeat(starts + added, sizes), 0)
    for number in changed:
        place = slice(starts[number], starts[number] + sizes[number])
        origins[place] = processor.normalize(texts[number], with_offsets=True)[1]
    return sizes, origins
