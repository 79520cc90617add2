"""The mean of all old rows.

Method: Hewitt, 2021, "Initializing New Word Embeddings for Pretrained Language Models",
https://nlp.stanford.edu/~johnhew/vocab-expansion.html, without its random part.
"""

from __future__ import annotations

from collections.abc import Mapping

from terakoya import hookimpl
from terakoya.components import Initializer, VocabularyChange


class MeanOfAll(Initializer):
    """The mean of all rows of the old vocabulary, the same for each new piece (Hewitt, 2021)."""

    def weights(self, change: VocabularyChange) -> list[Mapping[int, float]]:
        return [{} for _ in change.missing]


@hookimpl
def register_initializers() -> dict[str, type[Initializer]]:
    return {"mean_of_all": MeanOfAll}
