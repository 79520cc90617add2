"""The token stores of a run: opens and checks them, splits off validation, and puts their rows in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from terakoya.components.rows import Layout
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.data import Data
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.places import as_written, is_local
from terakoya.rows.loader import Loader, Stage
from terakoya.rows.row_source import RowSource
from terakoya.store.recorded_options import TEMPLATE_INPUT
from terakoya.store.subset import document_ranges, select_documents
from terakoya.store.token_store import TokenStore, open_store
from terakoya.store.tokenizer_identity import check_same_tokenizer

IN_ORDER = ("stream", "lines", "megatron", "padded")
"""Layouts whose rows can be read in the order of the store; the others combine documents that fit together."""


@dataclass(frozen=True)
class Stores:
    """The open token stores of a run, whose ids all mean the same.

    Attributes:
        data: the section `data` of the parameters.
        train: the stores of `data.train`, then those that only later steps use.
        validation: by the name under which their losses are reported.
    """

    data: Data
    train: tuple[TokenStore, ...]
    validation: dict[str, TokenStore]
    vocabulary: Vocabulary

    @classmethod
    def open(cls, data: Data, later: Sequence[Data] = ()) -> Stores:
        """Opens the stores that `data` names, and those that steps with `later` data name. Raises UserError if a store
        is missing, damaged or too small to be split, or two stores have different tokenizers."""
        train = [open_store(path) for path in _train_paths(data, later)]
        validation = _open_validation(data)
        first = train[0]
        for store in [*train[1:], *validation.values()]:
            check_same_tokenizer(first, store)
        _check_templates([*train, *validation.values()])
        if data.split is not None:
            train, validation = _split(train, data.split)
        return cls(data, tuple(train), validation, first.facts.vocabulary)

    @classmethod
    def of_run(cls, parameters: Parameters) -> Stores:
        """Opens the stores of a run, those that only later steps use included. Raises as `open`."""
        return cls.open(parameters.data, parameters.all_data)

    def fingerprints(self) -> dict[str, str]:
        """Returns name -> fingerprint of each store's content, for the manifest."""
        train = {store.name: store.fingerprint for store in self.train}
        return train | {name: store.fingerprint for name, store in self.validation.items()}

    def repetitions(self) -> list[str]:
        """Returns a warning for each store that has the content of a training store before it."""
        first: dict[str, TokenStore] = {}
        found = []
        for store in self.train:
            if (other := first.setdefault(store.fingerprint, store)) is not store:
                found.append(
                    f"data.train: {store.folder} has the content of {other.folder}: its documents are read more often"
                )
        for name, store in self.validation.items():
            if (other := first.get(store.fingerprint, store)) is not store:
                found.append(
                    f"data.validation: {name} has the content of the training store {other.folder}: its loss is that "
                    "of documents which the run learns"
                )
        return found

    def hash_validation(self, batches: int) -> str:
        """Returns a hash of what a validation reads that takes `batches` batches of each store, wherever they lie."""
        stores = sorted(store.fingerprint for store in self.validation.values())
        return hashlib.sha256(orjson.dumps([stores, batches])).hexdigest()[:16]

    def loader(self, layout: Layout, *, seed: int, global_rows: int) -> Loader:
        """Returns the loader of the run's rows in their order, with `global_rows` rows per step. Raises UserError if a
        store does not fit the layout, or the layout cannot be read in order."""
        data = self.data
        sources = self._sources(layout, [(store, data.sequence_length) for store in self.train], seed=seed)
        weights = [entry.weight for entry in data.train] + [0.0] * (len(sources) - len(data.train))
        folders = [store.folder for store in self.train]
        stages = [
            Stage(
                (stage.from_step - 1) * global_rows,
                {folders.index(entry.store): entry.weight for entry in stage.train},
            )
            for stage in data.stages
        ]
        return Loader(sources, weights, stages=stages)

    def loader_of_parts(
        self, layout: Layout, *, seed: int, parts: Sequence[Data]
    ) -> tuple[Loader, list[dict[int, float]]]:
        """Returns the loader of the first of `parts` of the run, and the weights of each by the number of the source.

        A store is a source of its own for each length of its rows; the same store with the same length is one source in
        all parts, and continues where it was. Raises as `loader`."""
        by_folder = {store.folder: store for store in self.train}
        chosen = dict.fromkeys((entry.store, data.sequence_length) for data in parts for entry in data.train)
        numbers = {each: number for number, each in enumerate(chosen)}
        sources = self._sources(layout, [(by_folder[folder], length) for folder, length in chosen], seed=seed)
        weights: list[dict[int, float]] = [{} for _ in parts]
        for of_part, data in zip(weights, parts, strict=True):
            for entry in data.train:
                number = numbers[entry.store, data.sequence_length]
                of_part[number] = of_part.get(number, 0.0) + entry.weight  # a store may be named twice
        first = [weights[0].get(number, 0.0) for number in range(len(sources))]
        return Loader(sources, first), weights

    def _sources(self, layout: Layout, stores: Sequence[tuple[TokenStore, int]], *, seed: int) -> list[RowSource]:
        """Returns the rows of each store in the length that stands beside it."""
        order = self.data.order
        if order == "sequential" and layout.kind not in IN_ORDER:
            raise UserError(
                f'data.order: "sequential" needs rows that follow the store, but objective.layout "{layout.kind}" '
                f"combines documents that fit together; use one of {', '.join(IN_ORDER)} that the objective has"
            )
        return [
            RowSource(store, layout, sequence_length=length, seed=seed, store_id=number, shuffle=order == "shuffled")
            for number, (store, length) in enumerate(stores)
        ]

    def validation_rows(self, layout: Layout, *, seed: int) -> dict[str, RowSource]:
        """Returns the rows of each validation store, in the order of the store, by its name."""
        length = self.data.sequence_length
        return {
            name: validation_rows(store, layout, sequence_length=length, seed=seed)
            for name, store in self.validation.items()
        }


def open_validation(parameters: Parameters, option: str | None = "--data") -> dict[str, TokenStore]:
    """Opens the validation stores of a run, or splits them off its training stores. Raises UserError if a store is
    damaged, too small to be split, or missing: then others are given with the `option`, or if it is None with --set."""
    data = parameters.data
    if data.split is not None:
        train = [open_store(path) for path in _train_paths(data, parameters.all_data)]
        return _split(train, data.split)[1]
    return _open_validation(data, option)


def check_places(parameters: Parameters) -> None:
    """Raises UserError where a store of the run is not there: what is known before torch is loaded."""
    for path in _train_paths(parameters.data, parameters.all_data):
        if is_local(path) and not path.exists():
            open_store(path)
    _check_validation(parameters.data)


def _open_validation(data: Data, option: str | None = None) -> dict[str, TokenStore]:
    _check_validation(data, option)
    return {as_written(path): open_store(path) for path in data.validation}


def _check_validation(data: Data, option: str | None = None) -> None:
    for path in data.validation:
        if is_local(path) and not path.exists():
            if option is not None:
                raise UserError(f"data.validation: {path}: no such folder; name a store: {option} STORE")
            raise UserError(
                f"data.validation: {path}: no such folder; prepare other text for it, or let documents of the training "
                "stores validate: --set 'data.validation=[]' --set 'data.split=[98,2]'"
            )


def validation_rows(store: TokenStore, layout: Layout, *, sequence_length: int, seed: int) -> RowSource:
    """Returns the rows of a validation store, in the order of the store. Their keys, and so their masks, depend on the
    store's content and the seed alone, not on what else the run reads."""
    return RowSource(
        store, layout, sequence_length=sequence_length, seed=seed, store_id=store.fingerprint, shuffle=False
    )


def _train_paths(data: Data, later: Sequence[Data]) -> list[Path]:
    """Returns the stores of `data.train`, then those that only its stages or `later` data use."""
    paths = [entry.store for entry in data.train]
    for mixture in (*(stage.train for stage in data.stages), *(each.train for each in later)):
        paths += [entry.store for entry in mixture if entry.store not in paths]
    return paths


def _check_templates(stores: Sequence[TokenStore]) -> None:
    """Raises UserError where conversations were written with different chat templates.

    A model would learn several, but its folder can name only one.
    """
    templates = {store.facts.inputs.get(TEMPLATE_INPUT): store for store in stores if store.facts.learned}
    if len(templates) > 1:
        first, other, *_ = templates.values()
        raise UserError(
            f"{other.folder}: its conversations were written with another chat template than those of {first.folder}; "
            "prepare them with the same --template"
        )


def _split(stores: Sequence[TokenStore], shares: Sequence[float]) -> tuple[list[TokenStore], dict[str, TokenStore]]:
    """Returns the part of each store to train on, and the part to validate on, by name."""
    train: list[TokenStore] = []
    validation: dict[str, TokenStore] = {}
    for store in stores:
        ranges = document_ranges(store.facts.documents, shares)
        for name, (first, stop), share in zip(("training", "validation"), ranges, shares, strict=False):
            if share and first == stop:
                remedy = (
                    "give it a larger share, or stores of their own in data.validation"
                    if store.facts.documents > 1
                    else "one document cannot be split: set data.split to null, and name another store in "
                    "data.validation or set evaluation to null"
                )
                raise UserError(
                    f"data.split: {list(shares)} leaves no document of {store.folder} for {name}: it has "
                    f"{store.facts.documents:,}; {remedy}"
                )
        train.append(select_documents(store, *ranges[0]))
        if shares[1]:
            validation.setdefault(f"{store.name} (validation)", select_documents(store, *ranges[1]))
    return train, validation
