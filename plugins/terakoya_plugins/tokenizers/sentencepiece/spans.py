"""Which characters of a text each piece stands for, exact for any normalisation.

Letters: T pieces of all texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def piece_spans(
    origins: Sequence[Sequence[int]], characters: Sequence[int], pieces: Sequence[int], lengths: np.ndarray
) -> np.ndarray:
    """Returns the first character of each piece in its text and the one after its last, (T, 2).

    `origins` has for each normalised text the position in the text from which each of its characters comes, and at its
    end the position after all; `characters` and `pieces` are the numbers of each text, `lengths` (T,) the number of
    normalised characters of each piece. A piece of length 0 is a further byte of the character before it. A space
    before the text that only the model sees comes from the first character.
    """
    sizes = np.fromiter(map(len, origins), np.int64, len(origins))
    text_starts = np.cumsum(characters) - characters + np.arange(len(origins))
    flat = np.fromiter(itertools.chain.from_iterable(origins), np.int64, int(sizes.sum()))
    flat += np.repeat(text_starts, sizes)
    of_piece = np.repeat(np.arange(len(origins)), pieces)
    stops = np.cumsum(lengths)
    assert np.array_equal(np.append(0, stops)[np.cumsum(pieces)], np.cumsum(sizes - 1)), (
        "the pieces do not add up to the texts"
    )
    last = stops - 1 + of_piece  # each text has one origin more than characters
    begin = np.minimum(last + 1 - lengths, last)
    after = np.append(flat, np.iinfo(np.int64).max)[np.searchsorted(flat, flat[last], side="right")]
    ends = text_starts + np.array(characters, np.int64)
    spans = np.stack([flat[begin], np.minimum(after, ends[of_piece])], axis=1)
    return spans - text_starts[of_piece][:, None]
