"""Gives the model of a folder the vocabulary of the stores: its rows of embeddings, output layer and biases.

See docs/design/new-vocabulary.md.

Letters: V rows of the folder's model, N ids of the stores, H the size of a row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from terakoya import plugins
from terakoya.components import Initializer, StartModel, VocabularyChange
from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError
from terakoya.store.tokenizer_identity import FILES, SHOWN, quote
from terakoya.toolkit.initializers.pieces import Pieces

DEFAULT_INITIALIZER = "pieces_and_mean"
ALIASES = {"cls": "bos", "bos": "cls", "sep": "eos", "eos": "sep"}
"""Special pieces that do the same work in encoders and decoders."""


@dataclass(frozen=True)
class NewRows:
    """The rows of a new vocabulary, in terms of the old ones.

    Attributes:
        size: N.
        old_size: the pieces of the old vocabulary; the model may have more rows, which belong to no piece.
        kept: new id -> the old id whose row it keeps.
        missing: the other ids below N, ascending.
        weights: for each of `missing` old id -> weight; what is missing to the sum 1 is the mean of all old rows.
    """

    size: int
    old_size: int
    kept: Mapping[int, int]
    missing: Sequence[int]
    weights: Sequence[Mapping[int, float]]

    def make(self, old: Tensor) -> Tensor:
        """Returns the rows (N, ...) of the new vocabulary from `old` (V, ...), those that are kept bit for bit."""
        rows = old.reshape(len(old), -1)
        mean = rows[: self.old_size].mean(0)
        new = mean.expand(self.size, -1).clone()
        made = [(id, each) for id, each in zip(self.missing, self.weights, strict=True) if each]
        if made:
            sizes = torch.tensor([len(each) for _, each in made])
            rest = torch.tensor([1 - sum(each.values()) for _, each in made], dtype=rows.dtype)
            new[[id for id, _ in made]] = rest[:, None] * mean + torch.nn.functional.embedding_bag(
                torch.tensor([id for _, each in made for id in each]),
                rows,
                sizes.cumsum(0) - sizes,
                mode="sum",
                per_sample_weights=torch.tensor([each[id] for _, each in made for id in each], dtype=rows.dtype),
            )
        new[list(self.kept)] = rows[list(self.kept.values())]
        return new.reshape(self.size, *old.shape[1:])

    def describe(self, name: str) -> str:
        """Returns a sentence with the numbers of rows; `name` is the initializer's."""
        means = sum(1 for each in self.weights if not each)
        rest = f", {means:,} of them as the mean of all rows" if means else ""
        return f"{len(self.kept):,} of {self.size:,} rows are kept, {len(self.missing):,} are made by {name}{rest}"


def plan_rows(start: StartModel) -> tuple[NewRows, str]:
    """Returns the rows that the model of `start` gets for the stores' vocabulary, and a sentence about them.

    Raises:
        UserError: the folder has no tokenizer, or one that does not fit its model or, with "extend", the stores'.
    """
    folder, config, change = start.folder, start.source.config, start.settings.vocabulary
    if not any((folder / name).is_file() for name in FILES):
        raise UserError(
            f'has no tokenizer, and "vocabulary": "{change}" compares its pieces with those of the stores; expected '
            f"one of {', '.join(FILES)}; copy the tokenizer of the model there"
        )
    old, new = Pieces(load_tokenizer(folder, config=config)), Pieces(load_tokenizer(start.tokenizer_folder))
    if old.size > config.vocab_size:
        raise UserError(
            f"its tokenizer has ids up to {old.size - 1:,}, its model rows for {config.vocab_size:,}; put the "
            "tokenizer that the model was trained with there"
        )
    kept = _keep_ids(old, new) if change == "extend" else _match_pieces(old, new)
    missing = [id for id in range(start.vocabulary.size) if id not in kept]
    initializer: Initializer | None = start.settings.initializer
    if initializer is None:
        initializer = plugins.registry().component("initializers", DEFAULT_INITIALIZER)()
    assert initializer is not None
    name = plugins.registry().name_of("initializers", type(initializer))
    weights = initializer.weights(VocabularyChange(old=old.tokenizer, new=new.tokenizer, kept=kept, missing=missing))
    rows = NewRows(start.vocabulary.size, old.size, kept, missing, weights)
    return rows, rows.describe(name)


def replace_rows(model: PreTrainedModel, rows: NewRows) -> None:
    """Gives `model` the vocabulary of `rows`, in all weights with a row for each id; tied ones stay tied."""
    weights = model.state_dict(keep_vars=True)
    done: set[int] = set()
    for name in vocabulary_weights(model):
        value = weights[name]
        if id(value) not in done:
            value.data = rows.make(value.data)
            done.add(id(value))
    model.config.vocab_size = rows.size


def vocabulary_weights(model: PreTrainedModel) -> list[str]:
    """Returns the names in the state dict of `model` whose first dimension is the vocabulary: those that have another
    shape in a model with one more id."""
    shapes = []
    for size in (model.config.vocab_size, model.config.vocab_size + 1):
        config = copy.deepcopy(model.config)
        config.vocab_size = size
        with torch.device("meta"):
            built = type(model)(config)
        shapes.append({name: value.shape for name, value in built.state_dict().items()})
    return [name for name, shape in shapes[0].items() if shape != shapes[1][name]]


def _keep_ids(old: Pieces, new: Pieces) -> dict[int, int]:
    """Every old id, which stays. Raises UserError where a piece or a special id is another one in `new`."""
    moved = [(piece, id, new.ids.get(piece)) for piece, id in old.ids.items() if new.ids.get(piece) != id]
    if moved:
        examples = "; ".join(
            f"{quote(piece)} is {id} there and {'missing' if other is None else other} here"
            for piece, id, other in sorted(moved, key=lambda each: each[1])[:SHOWN]
        )
        raise UserError(
            f'"vocabulary": "extend" expects its {len(old.ids):,} pieces with the same ids in the stores\' tokenizer, '
            f"{len(moved):,} are others ({examples}); add pieces with `terakoya tokenizer extend`, or use "
            '"vocabulary": "transplant"'
        )
    ours, theirs = new.role_ids(), old.role_ids()
    roles = [f"{role} is {id} there and {ours[role]} here" for role, id in theirs.items() if ours.get(role, id) != id]
    if roles:
        raise UserError(
            f'"vocabulary": "extend" expects the same special ids in the stores\' tokenizer: {"; ".join(roles)}; name '
            "the same special tokens in its tokenizer_config.json"
        )
    return {id: id for id in sorted(old.ids.values())}


def _match_pieces(old: Pieces, new: Pieces) -> dict[int, int]:
    """New id -> old id, of special pieces with the same role or name, and of pieces with the same text."""
    kept = {}
    roles, theirs = {id: role for role, id in reversed(new.role_ids().items())}, old.role_ids()
    for piece, id in sorted(new.ids.items(), key=lambda each: each[1]):
        if id in new.special:
            role = roles.get(id, "")
            named = old.ids.get(piece)
            found = theirs.get(role, named if named in old.special else theirs.get(ALIASES.get(role, "")))
        elif old.marks == new.marks and old.ids.get(piece) in old.texts:
            found = old.ids[piece]
        else:
            found = old.find(new.texts[id])
        if found is not None:
            kept[id] = found
    return kept
