"""Compares finished models and runs by their losses on held-out text, pair by pair of the same text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from terakoya.config.parameters import Parameters, changed_keys
from terakoya.errors import UserError
from terakoya.folder_kinds import distinct_names
from terakoya.inference.loading import find_device
from terakoya.inference.padded_attention import use_safe_attention
from terakoya.rows.stores import open_validation
from terakoya.runs.checkpoints import read_manifest, while_kept
from terakoya.store.token_store import TokenStore, open_store
from terakoya.store.tokenizer_identity import describe_different_ids
from terakoya_compare.document_losses import COPIES, DocumentLosses, common_window, load_model, measure_documents
from terakoya_compare.options import CompareOptions
from terakoya_compare.result import Comparison, Difference
from terakoya_compare.row_losses import RowLosses, measure_rows
from terakoya_compare.statistics import FEW, bootstrap_of_sums
from terakoya_evaluation.objective import RunObjective
from terakoya_evaluation.perplexity import open_data_sets

METHOD = "paired bootstrap"


def compare_models(options: CompareOptions) -> Comparison:
    """Returns the differences of the losses of models: by the objective of A's run on the same rows with the same masks
    where all are runs of one kind of objective, else by the predicted tokens of each document.

    Raises:
        UserError: the models and the text do not fit together.
    """
    each = [options.of(source) for source in options.sources]
    checkpoints = [one.checkpoint() for one in each]
    device = find_device(options.device, precision=options.precision or "fp32")
    use_safe_attention()
    names = [source.name for source in options.sources]
    if len({*names}) < len(names):
        names = distinct_names(options.sources)
    if not options.corpus and None not in checkpoints:
        found = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
        with ExitStack() as stack:
            for checkpoint in found:
                stack.enter_context(while_kept(checkpoint))
            manifests = [read_manifest(checkpoint) for checkpoint in found]
            if len({manifest["parameters"]["objective"]["type"] for manifest in manifests}) == 1:
                return _by_objective(options, found, manifests, names, device)
    return _by_documents(options, names, device)


def _by_objective(
    options: CompareOptions,
    checkpoints: Sequence[Path],
    manifests: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    device: torch.device,
) -> Comparison:
    like: Parameters | None = None
    stores: dict[str, TokenStore] = {str(path): open_store(path) for path in options.stores}
    found: list[dict[str, RowLosses]] = []
    notes = []
    for checkpoint, manifest, name in zip(checkpoints, manifests, names, strict=True):
        objective = RunObjective(checkpoint, manifest, device=device, precision=options.precision)
        if like is None:
            like = objective.parameters
            stores = stores or open_validation(objective.parameters, "--validation")
        other = [key for key in changed_keys(like, objective.parameters) if key.startswith("objective.")]
        if other:
            notes.append(f"{name} was trained with another objective ({', '.join(other)}); all are measured by A's")
        found.append({each: measure_rows(objective, like, store, options.limit) for each, store in stores.items()})
    assert like is not None
    if not stores:
        raise UserError(f"{checkpoints[0]}: its run has no validation store; name a store: --validation STORE")
    settings = {
        "objective": manifests[0]["parameters"]["objective"]["type"],
        "length": like.data.sequence_length,
        "mask seed": like.seed,
        "limit": options.limit,
        "precision": options.precision,
    }
    differences = [each for number in range(1, len(names)) for each in _of_rows(found, names, number)]
    fewest = min(int(each.blocks.max()) + 1 for each in found[0].values())
    return Comparison("models", settings, differences, [*notes, *_few(fewest)])


def _of_rows(found: Sequence[Mapping[str, RowLosses]], names: Sequence[str], number: int) -> list[Difference]:
    """Returns the differences between the first model and that of this `number`."""
    differences = []
    for store, one in found[0].items():
        other = found[number][store]
        blocks, rows = int(one.blocks.max()) + 1, len(one.blocks)
        further = {"tokens": one.tokens, "rows": rows, "blocks": blocks}
        for score, weights in one.scores():
            values = (one.mean(weights), other.mean(weights))
            pairs = f"{rows:,} rows" if rows == blocks else f"{blocks:,} blocks of {rows:,} rows"
            differences.append(
                Difference(
                    store, score, (names[0], names[number]), values, one.compare(other, weights), pairs, METHOD,
                    larger_is_better=score.endswith("accuracy"), further=further,
                )
            )  # fmt: skip
    return differences


def _by_documents(options: CompareOptions, names: Sequence[str], device: torch.device) -> Comparison:
    if not (options.stores or options.corpus):
        raise UserError(
            "nothing to compare on: name --validation STORE, --corpus FILE or --task TASK; only runs of one objective "
            "have a store of their own"
        )
    loaded = [load_model(options.of(source), device) for source in options.sources]
    window = common_window(loaded)
    vocabularies = [model.tokenizer.get_vocab() for model in loaded]
    for model, vocabulary in zip(loaded, vocabularies, strict=True):
        different = describe_different_ids(vocabularies[0], vocabulary, loaded[0].folder, model.folder)
        if different and options.stores:
            raise UserError(
                f"{model.folder}: has another tokenizer than {loaded[0].folder} ({different}): a loss of tokens cannot "
                "be compared; give --corpus FILE, of which each model makes its own tokens, for bits a character"
            )
    found: list[dict[str, DocumentLosses]] = []
    for source, model in zip(options.sources, loaded, strict=True):
        data_sets = open_data_sets(model, options.of(source))
        found.append(
            {
                data.name: measure_documents(
                    model, data, window=window, limit=options.limit, batch_tokens=options.batch_tokens
                )
                for data in data_sets
            }
        )
    differences, notes = [], []
    for number in range(1, len(names)):
        for data, one in found[0].items():
            of_data, note = _of_documents(data, one, found[number][data], (names[0], names[number]))
            differences += of_data
            notes += note
    fewest = min(len(each.sums) for each in found[0].values())
    measure = "next token" if loaded[0].kind == "causal" else f"each token masked once, in {COPIES} copies"
    settings = {"predicted": measure, "length": window, "limit": options.limit, "precision": options.precision}
    return Comparison("models", settings, differences, [*dict.fromkeys(notes), *_few(fewest)])


def _of_documents(
    data: str, one: DocumentLosses, other: DocumentLosses, names: tuple[str, str]
) -> tuple[list[Difference], list[str]]:
    """Returns the differences on one data set, and what is to be said of them."""
    same = np.array_equal(one.ids, other.ids)
    columns = np.stack([one.sums, other.sums, one.tokens, other.tokens, one.characters, other.characters], axis=1)
    columns = columns[(one.tokens > 0) | (other.tokens > 0)].astype(np.float64)
    totals = columns.sum(axis=0)
    further = {
        "documents": len(columns), "tokens": [int(totals[2]), int(totals[3])], "characters": int(totals[4]) or None
    }  # fmt: skip
    differences = []
    for score, counted, unit in (("loss", 2, 1.0), ("bits_per_character", 4, math.log(2))):
        if not totals[counted] or (score == "loss" and not same):
            continue

        def difference(sums: np.ndarray, counted: int = counted, unit: float = unit) -> np.ndarray:
            found: np.ndarray = (sums[:, 1] / sums[:, counted + 1] - sums[:, 0] / sums[:, counted]) / unit
            return found

        values = tuple(float(totals[side] / totals[counted + side] / unit) for side in (0, 1))
        test, pairs = bootstrap_of_sums(columns, difference), f"{len(columns):,} documents"
        differences.append(Difference(data, score, names, (values[0], values[1]), test, pairs, METHOD, further=further))
    if same:
        return differences, []
    if not differences:
        raise UserError(f"{data}: the models make other tokens of it, and how much text they stand for is not known")
    return differences, ["the models make other tokens of the text: bits a character compare, a loss a token does not"]


def _few(pairs: int) -> list[str]:
    """Returns a warning where intervals are too narrow."""
    if pairs >= FEW:
        return []
    return [f"only {pairs:,} independent parts of the text: of so few an interval is too narrow"]
