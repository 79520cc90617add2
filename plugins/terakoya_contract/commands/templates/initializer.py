"""The initializer `example`: a new piece begins as the pieces of its first characters."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import PositiveInt
from terakoya import hookimpl
from terakoya.components import Initializer, VocabularyChange


class Example(Initializer):
    """The mean of the old pieces of the new piece's first characters."""

    characters: PositiveInt = 2
    """How many characters count. Unit: characters."""

    def weights(self, change: VocabularyChange) -> list[Mapping[int, float]]:
        """Returns for each new piece old id -> weight; what is missing to the sum 1 is the mean of all old rows."""
        from terakoya.toolkit.initializers.pieces import Pieces, PieceText

        old, new = Pieces(change.old), Pieces(change.new)
        result: list[Mapping[int, float]] = []
        for id in change.missing:
            piece = new.texts.get(id, PieceText(b"", True))  # special pieces have no text
            begin = piece.text.decode(errors="ignore")[: self.characters].encode()
            ids = set(old.divide(PieceText(begin, piece.begins_word)))
            result.append(dict.fromkeys(ids, 1 / len(ids)) if ids else {})
        return result


@hookimpl
def register_initializers() -> dict[str, type[Initializer]]:
    """Registers `example`, for `start_from.initializer`."""
    return {"example": Example}
