"""The mean of the pieces that the old tokenizer divides a new piece into.

Method: Gee et al., 2022, "Fast Vocabulary Transfer for Language Model Compression", arXiv:2402.09977.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from terakoya import hookimpl
from terakoya.components import Initializer, VocabularyChange


class MeanOfPieces(Initializer):
    """The mean of the rows of the pieces that the model's tokenizer divides the new piece into (Gee et al., 2022)."""

    def weights(self, change: VocabularyChange) -> list[Mapping[int, float]]:
        """Implements `Initializer.weights`: each piece weighs as often as it occurs."""
        from terakoya.toolkit.initializers.pieces import Pieces

        old, new = Pieces(change.old), Pieces(change.new)
        result: list[Mapping[int, float]] = []
        for id in change.missing:
            counts = Counter(old.divide(new.texts[id])) if id in new.texts else Counter[int]()
            result.append({piece: count / counts.total() for piece, count in counts.items()})
        return result


@hookimpl
def register_initializers() -> dict[str, type[Initializer]]:
    return {"mean_of_pieces": MeanOfPieces}
