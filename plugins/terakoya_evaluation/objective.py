"""Evaluates a checkpoint as validation does: the objective's losses over the rows of stores."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.plugins.run_record import check_plugins
from terakoya.rows.stores import open_validation, validation_rows
from terakoya.runs.checkpoints import read_manifest, while_kept
from terakoya.store.token_store import TokenStore, open_store
from terakoya.store.tokenizer_identity import check_tokenizer_of_run
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.fast_products import precision_problems
from terakoya.training.batches import to_device
from terakoya.training.checkpoint.restoring import restore_module, saved_parameters
from terakoya.training.engines.engine import autocast_forward
from terakoya.training.loss import Meter, to_bits
from terakoya_evaluation.options import EvaluateOptions
from terakoya_evaluation.result import Evaluation, Numbers

log = logging.getLogger("terakoya")


def measure_objective(options: EvaluateOptions, device: torch.device) -> Evaluation:
    """Returns the losses of the run's objective on the options' stores, or on its validation stores. Raises UserError
    if there is no checkpoint, no store, or an option does not fit."""
    checkpoint = options.checkpoint()
    if checkpoint is None:
        raise UserError(f"{options.source}: a Transformers folder has no objective; name a run or a checkpoint")
    if options.corpora or options.corpus:
        raise UserError("--measure objective: needs token stores; prepare the corpus, or leave out --measure")
    for option in options.windows:
        raise UserError(f"{option}: the objective uses the run's row length; this option is for perplexity")
    with while_kept(checkpoint):
        manifest = read_manifest(checkpoint)
        objective = RunObjective(checkpoint, manifest, device=device, precision=options.precision)
        stores = {str(path): open_store(path) for path in options.stores} or open_validation(objective.parameters)
        if not stores:
            raise UserError(f"{checkpoint}: its run has no validation store; name a store: --data STORE")
        results = {
            name: objective.evaluate(store, rows=options.limit, batch_tokens=options.batch_tokens)
            for name, store in stores.items()
        }
    parameters = manifest["parameters"]
    settings = {
        "objective": parameters["objective"]["type"],
        "length": parameters["data"]["sequence_length"],
        "limit": options.limit,
        "step": manifest["step"],
        "precision": objective.precision,
    }
    return Evaluation(checkpoint, "objective", settings, results)


class RunObjective:
    """The objective of a checkpoint with its weights, on one device."""

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], *, device: torch.device, precision: str | None
    ) -> None:
        """Builds the checkpoint's module as its run did. Raises UserError if plugins are missing, or the checkpoint
        does not fit the model."""
        missing = check_plugins(registry(), manifest["plugins"], manifest["parameters"], events=False).missing
        if missing:
            raise UserError(f"{folder}: " + "; ".join(missing))
        self.folder, self.manifest, self.device = folder, manifest, device
        self.parameters = saved_parameters(folder, manifest)
        self.vocabulary = Vocabulary.model_validate(manifest["vocabulary"])
        own = self.parameters.precision
        self.precision = precision or ("bf16" if own == "fp8" else own)  # nothing is multiplied in 8 bits
        for text in precision_problems("fp32" if precision else self.precision, device):
            log.warning(text)
        module = restore_module(
            folder, self.parameters, self.vocabulary,
            tokenizer_folder=folder / "tokenizer", started_from=manifest.get("started_from"),
        )  # fmt: skip
        module = module.to(device).eval()
        facts = attention.find_facts(module, self.precision, self.parameters.architecture.document_masking)
        wanted = "auto" if self.parameters.attention == "flash" else self.parameters.attention  # where flash can be
        length = self.parameters.data.sequence_length
        backend = attention.choose(wanted, device=device, length=length, **{**facts, "dropout": 0.0})
        attention.use(module, backend)
        autocast_forward(module, device, self.precision)
        self.module, self.flash = module, backend == "flash"

    def evaluate(self, store: TokenStore, *, rows: int | None, batch_tokens: int) -> Numbers:
        """Returns the means of the objective's terms over the rows of `store`, also in bits for each character and byte
        of the store's text, what it derives from them, the counts of the terms, and `rows`. A validation store of the
        run gets the same rows and masks as in the run's validation. Raises UserError if the store was prepared with
        another vocabulary.

        Args:
            rows: evaluate only so many rows, evenly taken from all; None: all.
            batch_tokens: largest number of tokens in a batch.
        """
        if store.facts.vocabulary != self.vocabulary:
            raise UserError(
                f"{store.folder}: was prepared with another tokenizer than the run's; prepare it with "
                f"{self.folder / 'tokenizer'}"
            )
        check_tokenizer_of_run(store, self.folder / "tokenizer")
        objective = self.parameters.objective
        length, seed = self.parameters.data.sequence_length, self.parameters.seed
        source = validation_rows(store, objective.row_layout(), sequence_length=length, seed=seed)
        terms = objective.terms()
        meter = Meter(terms, self.device, objective.derive_metrics)
        counts = dict.fromkeys(sorted({"tokens", *(term.count for term in terms.values())}), 0)
        number_of_rows = len(source) if rows is None else min(rows, len(source))
        spread = source.spread(number_of_rows)
        size = max(1, batch_tokens // length)
        for first in range(0, number_of_rows, size):
            batch = objective.collate(source.load(0, spread[first : first + size]), self.vocabulary)
            with torch.no_grad():
                meter.add_sums(self.module(to_device(batch, self.device, flash=self.flash)))
            for name in counts:
                counts[name] += batch.counts[name]
        meter.add_counts(counts)
        means = meter.take_means(meter.local_sums())
        return {**means, **to_bits(means, terms, store.text_per_token), **counts, "rows": number_of_rows}
