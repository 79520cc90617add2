"""Logits of chosen rows in a file: what the model says of each token, for a look with numpy, or for a distillation.

The model is that of an export of this step: a plain one of Transformers on the CPU, in float32. It reads a row as a
validation does, masked by the row's own key, and one document after another. Training is the same with and without it.

`RUN/logits/step-N.safetensors` has for row R of the store STORE, n tokens without padding:

    STORE/R/input_ids      (n,) int64    what the model has read
    STORE/R/document_ids   (n,) int64    the document in the row, from 0
    STORE/R/labels         (n,) int64    causal: the next token, -100 where there is none
    STORE/R/logits         (n, V) float32; with `top` the (n, top) largest
    STORE/R/top_ids        (n, top) int64    the tokens that these are of

Where several models are exported, each has its `STORE/R/NAME/logits`; a discriminator's are (n,).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from terakoya.atomic_files import write_atomically
from terakoya.components import EventListener, EventPlugin, Validations
from terakoya.errors import UserError
from terakoya.runs.metrics import store_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from terakoya.components.rows import Rows
    from terakoya.components.run import Run
    from terakoya.rows.row_source import RowSource
    from terakoya.training.run import Run as TrainingRun

FOLDER = "logits"


class Logits(EventPlugin):
    """Writes the logits of chosen rows of each validation store into RUN/logits, on rank 0 alone."""

    rows: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1, strict=False)] = (0,)
    """The rows, counted from 0 in the order in which a validation reads them."""
    top: PositiveInt | None = None
    """How many of the largest logits of each token are written, with their ids; null writes all. Unit: tokens."""
    steps: Annotated[tuple[NonNegativeInt, ...] | None, Field(strict=False)] = None
    """The steps after which they are written, if the run validates there; null is each validation. Unit: optimizer
    steps."""

    def check(self, parameters: Any) -> None:
        if not parameters.data.has_validation:
            raise UserError("rows: there are no rows to read; name a store in data.validation, or give data.split")
        if parameters.objective.row_layout().framing == "encoder_decoder":
            raise UserError("rows: a decoder beside an encoder reads other rows than the encoder; leave the event out")

    def start(self, run: Run) -> EventListener:
        return _Listener(self)


class _Listener(EventListener):
    def __init__(self, settings: Logits) -> None:
        self.settings = settings
        self.sources: dict[str, RowSource] = {}

    def run_started(self, run: Run) -> None:
        if run.rank != 0:
            return
        if not run.holds_whole_model:
            run.warn("events.logits: each process holds a part of the model only; there are no logits")
            return
        from terakoya.rows.stores import open_validation, validation_rows

        parameters, layout = run.parameters, run.objective.row_layout()
        stores = open_validation(parameters)
        short = store_names(stores)
        length, seed = parameters.data.sequence_length, parameters.seed
        for name, store in stores.items():
            source = validation_rows(store, layout, sequence_length=length, seed=seed)
            if (most := max(self.settings.rows)) >= len(source):
                raise UserError(
                    f"events.logits.rows: expected rows below {len(source):,}, those of {name}, got {most:,}"
                )
            self.sources[short[name]] = source

    def validation_finished(self, run: Run, values: Validations) -> None:
        steps = self.settings.steps
        if not self.sources or (steps is not None and run.step not in steps):
            return
        import torch
        from safetensors.numpy import save

        from terakoya.training.model.lora import merged_copy

        training = cast("TrainingRun", run)
        with torch.random.fork_rng(devices=()), torch.no_grad():  # the copy is randomly initialised first
            module = merged_copy(training.built_parameters, run.module, run.vocabulary).eval()
            models = run.objective.exports(module)
            found: dict[str, np.ndarray] = {}
            for store, source in self.sources.items():
                for row in self.settings.rows:
                    rows = source.load(0, np.array([row]))
                    found |= {f"{store}/{row}/{name}": each for name, each in self._tensors(run, models, rows)}
        file = run.folder / FOLDER / f"step-{run.step}.safetensors"
        file.parent.mkdir(exist_ok=True)
        with write_atomically(file) as stream:
            stream.write(save({name: np.ascontiguousarray(each) for name, each in found.items()}))
        run.write(FOLDER, file=f"{FOLDER}/{file.name}")

    def _tensors(self, run: Run, models: Mapping[str, PreTrainedModel], rows: Rows) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the tensors of one row, by name."""
        import torch

        used = rows.document_ids[0] >= 0
        ids = run.objective.collate(rows, run.vocabulary).arrays["input_ids"]
        if ids.shape != rows.tokens.shape:
            raise UserError(f"events.logits: {type(run.objective).__name__} reads other rows than those of the store")
        documents, ids = rows.document_ids[0][used], ids[0][used]
        yield "input_ids", ids.astype(np.int64)
        yield "document_ids", documents.astype(np.int64)
        if rows.labels is not None:
            yield "labels", rows.labels[0][used].astype(np.int64)
        for name, model in models.items():
            parts = []
            for document in np.unique(documents):
                given = {"input_ids": ids[documents == document]}
                if rows.token_type_ids is not None:
                    given["token_type_ids"] = rows.token_type_ids[0][used][documents == document]
                output = model(**{key: torch.from_numpy(each.astype(np.int64))[None] for key, each in given.items()})
                parts.append(output.logits[0] if hasattr(output, "logits") else output.prediction_logits[0])
            logits, prefix = torch.cat(parts).float(), f"{name}/" if name else ""
            if self.settings.top is not None and logits.ndim == 2:
                logits, top_ids = logits.topk(min(self.settings.top, logits.shape[-1]))
                yield f"{prefix}top_ids", top_ids.numpy()
            yield f"{prefix}logits", logits.numpy()
