"""The pieces that the old tokenizer divides a new piece into, the later ones more than the earlier ones, moved towards
the mean of all old rows.

The mean of pieces says what a new piece means, but not how rare it is: where it is a row of the output, too, a new
piece becomes as probable as the frequent pieces that it is made of, together more than all others. The mean of all rows
is about as probable as any piece and says nothing. Between the two a new piece is rare and means something. The last
piece counts most, because after it the model has learned to go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from terakoya import hookimpl
from terakoya.components import Initializer, VocabularyChange


class PiecesAndMean(Initializer):
    """The mean of all old rows, and the pieces that the model's tokenizer divides the new piece into, each with twice
    the weight of the one before it."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What part of a row its pieces make; the mean of all rows makes the rest."""

    def weights(self, change: VocabularyChange) -> list[Mapping[int, float]]:
        from terakoya.toolkit.initializers.pieces import Pieces

        old, new = Pieces(change.old), Pieces(change.new)
        divided = (old.divide(new.texts[id]) if id in new.texts else [] for id in change.missing)
        return [self._doubling(pieces) for pieces in divided]

    def _doubling(self, pieces: Sequence[int]) -> Mapping[int, float]:
        weights: dict[int, float] = {}
        for before, id in enumerate(reversed(pieces)):
            weights[id] = weights.get(id, 0.0) + 0.5**before
        total = sum(weights.values())
        return {id: self.share * weight / total for id, weight in weights.items()}


@hookimpl
def register_initializers() -> dict[str, type[Initializer]]:
    return {"pieces_and_mean": PiecesAndMean}
