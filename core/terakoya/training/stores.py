"""The token stores of a run: opened, cut into training and validation, found to belong together, made into an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terakoya.components.rows import Layout
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.rows.loader import Loader, Stage
from terakoya.rows.row_source import RowSource
from terakoya.store.recorded_options import TEMPLATE_INPUT
from terakoya.store.subset import document_ranges, select_documents
from terakoya.store.token_store import TokenStore

IN_ORDER = ("stream", "lines", "megatron", "padded")
"""Layouts whose rows can be read in the order of the store; the others put documents together as they fit."""


@dataclass(frozen=True)
class Stores:
    """The token stores of a run, opened and found to belong together.

    Attributes:
        train: those of `data.train`, then what its stages add.
        validation: by the name under which their losses are reported.
    """

    train: tuple[TokenStore, ...]
    validation: dict[str, TokenStore]
    vocabulary: Vocabulary

    @classmethod
    def open(cls, parameters: Parameters) -> Stores:
        """Opens what `data` names.

        Raises:
            UserError: a store is missing, damaged or too small to be split, or two were made with different
                vocabularies.
        """
        data = parameters.data
        paths = [each.store for each in data.train]
        for stage in data.stages:
            paths += [each.store for each in stage.train if each.store not in paths]
        train = [TokenStore.open(path) for path in paths]
        validation = {str(path): TokenStore.open(path) for path in data.validation}
        first = train[0]
        for store in [*train[1:], *validation.values()]:
            if store.facts.vocabulary != first.facts.vocabulary:
                raise UserError(
                    f"{store.folder}: was made with another tokenizer than {first.folder}; prepare it with the same"
                )
        _check_templates([*train, *validation.values()])
        if data.split is not None:
            train, validation = _split(train, data.split)
        return cls(tuple(train), validation, first.facts.vocabulary)

    def fingerprints(self) -> dict[str, str]:
        """Each store's content, for the manifest."""
        train = {str(store.folder): store.fingerprint for store in self.train}
        return train | {name: store.fingerprint for name, store in self.validation.items()}

    def loader(self, parameters: Parameters, layout: Layout, *, global_rows: int) -> Loader:
        """The order of the run's rows, `global_rows` a step.

        Raises:
            UserError: a store does not fit the layout, or the layout cannot be read in order.
        """
        data = parameters.data
        if data.order == "sequential" and layout.kind not in IN_ORDER:
            raise UserError(
                f'data.order: "sequential" needs rows that follow the store, but objective.layout "{layout.kind}" puts '
                f"documents together as they fit; use one of {', '.join(IN_ORDER)} that the objective has"
            )
        sources = self._sources(self.train, parameters, layout, shuffle=data.order == "shuffled")
        weights = [each.weight for each in data.train] + [0.0] * (len(sources) - len(data.train))
        folders = [store.folder for store in self.train]
        stages = [
            Stage((stage.from_step - 1) * global_rows, {folders.index(each.store): each.weight for each in stage.train})
            for stage in data.stages
        ]
        return Loader(sources, weights, stages=stages)

    def validation_rows(self, parameters: Parameters, layout: Layout) -> dict[str, RowSource]:
        """The rows of each validation store, in order, by its name."""
        stores = list(self.validation.values())
        rows = self._sources(stores, parameters, layout, shuffle=False, first=len(self.train))
        return dict(zip(self.validation, rows, strict=True))

    def _sources(
        self, stores: Sequence[TokenStore], parameters: Parameters, layout: Layout, *, shuffle: bool, first: int = 0
    ) -> list[RowSource]:
        return [
            RowSource(
                store,
                layout,
                sequence_length=parameters.data.sequence_length,
                seed=parameters.seed,
                store_index=first + index,
                shuffle=shuffle,
            )
            for index, store in enumerate(stores)
        ]


def _check_templates(stores: Sequence[TokenStore]) -> None:
    """Raises UserError where conversations were written with different templates: a model would learn two, and its
    folder can name one alone."""
    found = {store.facts.inputs.get(TEMPLATE_INPUT): store for store in stores if store.facts.answers}
    if len(found) > 1:
        first, other, *_ = found.values()
        raise UserError(
            f"{other.folder}: its conversations were written with another chat template than those of {first.folder}; "
            "prepare them with the same --template"
        )


def _split(stores: Sequence[TokenStore], shares: Sequence[float]) -> tuple[list[TokenStore], dict[str, TokenStore]]:
    """The part of each store to train on, and that to validate on, by name."""
    train: list[TokenStore] = []
    validation: dict[str, TokenStore] = {}
    for store in stores:
        ranges = document_ranges(store.facts.documents, shares)
        for name, (first, stop), share in zip(("training", "validation"), ranges, shares, strict=False):
            if share and first == stop:
                raise UserError(
                    f"data.split: {list(shares)} leaves no document of {store.folder} for {name}: it has "
                    f"{store.facts.documents:,}; give it a larger share, or stores of their own in data.validation"
                )
        train.append(select_documents(store, *ranges[0]))
        if shares[1]:
            validation.setdefault(f"{store.folder} (validation)", select_documents(store, *ranges[1]))
    return train, validation
