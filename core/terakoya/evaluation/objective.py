"""What a run measures in its validation, measured again: the objective's losses over the rows of stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import to_device
from terakoya.training.checkpoint.restoring import restore_module
from terakoya.training.engines.engine import autocast_forward
from terakoya.training.loss import Meter, total_counts


class RunObjective:
    """The objective of a checkpoint over its weights, on one device."""

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], *, device: torch.device, precision: str | None
    ) -> None:
        """Builds the checkpoint's module, as its run did.

        Raises:
            UserError: plugins are missing, or the checkpoint is of another model.
        """
        lacking = registry().check_record(manifest["plugins"], manifest["parameters"], events=False).missing
        if lacking:
            raise UserError(f"{folder}: " + "; ".join(lacking))
        self.folder, self.manifest, self.device = folder, manifest, device
        self.parameters = Parameters.from_dict(manifest["parameters"], source=str(folder / "manifest.json"))
        self.vocabulary = Vocabulary.model_validate(manifest["vocabulary"])
        self.precision = precision or self.parameters.precision
        module = restore_module(
            folder, self.parameters, self.vocabulary,
            tokenizer_folder=folder / "tokenizer", started_from=manifest.get("started_from"),
        )  # fmt: skip
        module = module.to(device).eval()
        backend = attention.choose(
            "sdpa" if self.parameters.attention == "flash" and self.precision == "fp32" else self.parameters.attention,
            device=device,
            precision=self.precision,
            dropout=0.0,
            isolation=self.parameters.architecture.isolation,
        )
        attention.use(module, backend)
        autocast_forward(module, device, self.precision)
        self.module, self.flash = module, backend == "flash"

    def validation_stores(self) -> Sequence[Path]:
        """Those that the run validates on."""
        return self.parameters.data.validation

    def evaluate(self, store: TokenStore, *, number: int, rows: int | None, batch_tokens: int) -> Mapping[str, float]:
        """The means of every term over the rows of `store`, all or the first `rows`, and what the objective derives;
        `rows` and counts beside them.

        A store on which the run validates gets the rows and masks that it gets there; another is the `number`-th of
        those that are new.

        Raises:
            UserError: the store was made with another vocabulary.
        """
        if store.facts.vocabulary != self.vocabulary:
            raise UserError(
                f"{store.folder}: was made with another tokenizer than the run's; prepare it with "
                f"{self.folder / 'tokenizer'}"
            )
        objective = self.parameters.objective
        source = RowSource(
            store,
            objective.row_layout(),
            sequence_length=self.parameters.data.sequence_length,
            seed=self.parameters.seed,
            store_index=self._index(store, number),
            shuffle=False,
        )
        terms = objective.terms()
        meter = Meter(terms, self.device, objective.derived)
        counts = dict.fromkeys(sorted({"tokens", *(term.count for term in terms.values())}), 0)
        number_of_rows = len(source) if rows is None else min(rows, len(source))
        for positions in _pieces(number_of_rows, max(1, batch_tokens // self.parameters.data.sequence_length)):
            batch = objective.collate(source.load(0, positions), self.vocabulary)
            with torch.no_grad():
                meter.add_sums(self.module(to_device(batch, self.device, flash=self.flash)))
            for name, count in zip(counts, total_counts([batch], list(counts)), strict=True):
                counts[name] += count
        meter.add_counts(counts)
        return {**meter.take(meter.stacked()), **counts, "rows": number_of_rows}

    def _index(self, store: TokenStore, number: int) -> int:
        """The store's number in the run, a part of the key of each of its rows."""
        known = [self.manifest["stores"].get(str(path)) for path in self.parameters.data.validation]
        place = known.index(store.fingerprint) if store.fingerprint in known else len(known) + number
        return len(self.parameters.data.train) + place


def _pieces(rows: int, size: int) -> Iterator[np.ndarray]:
    for first in range(0, rows, size):
        yield np.arange(first, min(first + size, rows))
