"""Ways to make the embeddings of pieces that a model's vocabulary does not have yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terakoya.components.base import Component

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class VocabularyChange:
    """A model's vocabulary, and the one that it gets.

    Attributes:
        old: the tokenizer of the model.
        new: the tokenizer of the run's stores.
        kept: new id -> the old id whose row it keeps. An old id may be there more than once.
        missing: the new ids without such a row, ascending.
    """

    old: PreTrainedTokenizerBase
    new: PreTrainedTokenizerBase
    kept: Mapping[int, int]
    missing: Sequence[int]


class Initializer(Component):
    """How a run that starts from another vocabulary (`start_from.vocabulary`) makes the rows of new pieces.

    Every method is a weighted mean of the rows that the model has. The same weights make the rows of the embeddings, of
    an output layer that is not tied to them, and of its bias.
    """

    def weights(self, change: VocabularyChange) -> Sequence[Mapping[int, float]]:
        """Returns for each of `change.missing` the weights of old rows: old id -> weight, which are positive and have
        a sum of at most 1. What is missing to 1 is the weight of the mean of all old rows: an empty mapping is this
        mean.

        A pure function: called again for the same change, it returns the same weights.
        """
        raise NotImplementedError
