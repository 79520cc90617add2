"""Trains recipes with several seeds and compares their losses: runs that share a seed are a pair.

Both runs of a pair begin with the same weights where names and shapes agree, read the same rows in the same order with
the same masks, and are measured on the same held-out rows with the same masks. What the seed does to a loss is thus
mostly the same in both, and gone from their difference.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from terakoya.atomic_files import check_writable, write_text
from terakoya.checking.model_errors import explain_model_errors
from terakoya.config.parameters import Parameters, changed_keys
from terakoya.errors import Stopped, UserError
from terakoya.inference.loading import find_device
from terakoya.json_settings import read_json
from terakoya.log import error_console
from terakoya.rows.stores import open_validation
from terakoya.runs.checkpoints import read_manifest
from terakoya.runs.finding import find_checkpoint
from terakoya.store.token_store import TokenStore, open_store
from terakoya.training.checkpoint.event_tensors import load_weights, plugins_in
from terakoya.training.setup import StartOptions, train_in_this_process
from terakoya_compare.options import CompareOptions
from terakoya_compare.result import Comparison, Difference
from terakoya_compare.row_losses import measure_rows
from terakoya_compare.shared_start import sharing_start
from terakoya_compare.statistics import paired_t, unpaired_t
from terakoya_evaluation.objective import RunObjective

SEEDS = 3
FOUND = "compared.json"
"""The file of a finished run with its losses, and with what they were measured by."""
AVERAGE = "ema"
"""The event plugin whose weights are measured where a run has them: they are what the recipe is about."""
NOT_SHARED = ("data.", "batch_size", "objective.layout", "max_tokens", "phases")
"""Beginnings of keys that decide which rows a step takes."""


@dataclass(frozen=True)
class Recipe:
    """A parameter file or a change of one, and its folder, in which every seed has a run."""

    name: str
    parameters: Parameters
    folder: Path

    def with_seed(self, seed: int) -> Parameters:
        """Returns the parameters of the run of this `seed`."""
        return Parameters.from_dict({**self.parameters.dump(), "seed": seed}, source=self.name)


def compare_recipes(options: CompareOptions) -> Comparison:
    """Trains what is not trained yet, and returns the differences of the losses of the recipes.

    Raises:
        UserError: the recipes do not fit together, or one cannot be trained.
        Stopped: a run was stopped; the same call goes on with it.
    """
    if options.out is None:
        raise UserError("expected --out, the folder for the runs of the recipes")
    check_writable(options.out)
    recipes = read_recipes(options)
    first, seeds = recipes[0], range(1, (options.seeds or SEEDS) + 1)
    notes = _check(recipes)
    stores = {str(path): open_store(path) for path in options.stores} or open_validation(first.parameters, None)
    if not stores:
        raise UserError(
            f"{first.name}: has no held-out text to compare on: give --validation STORE, or set data.validation"
        )
    for recipe in recipes:
        recipe.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(recipe.parameters.dump(), indent=2, ensure_ascii=False)
        write_text(recipe.folder / "recipe.json", f"{content}\n")
    found: dict[str, list[Mapping[str, Mapping[str, float]]]] = {recipe.name: [] for recipe in recipes}
    for seed in seeds:  # pair after pair: what is there when it is stopped can be compared
        for recipe in recipes:
            number = sum(map(len, found.values())) + 1
            where = f"run {number:,} of {len(recipes) * len(seeds):,}: {recipe.name}, seed {seed}"
            error_console().print(where, markup=False, soft_wrap=True)
            changed = changed_keys(first.parameters, recipe.parameters)
            shares = any(key.startswith(("architecture.", "objective.")) for key in changed)
            with sharing_start(first.folder / "recipe.json") if shares else nullcontext():
                found[recipe.name].append(_losses(recipe, first.with_seed(seed), stores, options))
    differences = [
        each for other in recipes[1:] for store in stores for each in _differences(store, first, other, found)
    ]
    if len(seeds) == 1:
        notes.append("one seed: no interval; a difference may be that of this seed alone")
    settings = {"seeds": len(seeds), "out": str(options.out), "limit": options.limit}
    return Comparison("recipes", settings, differences, notes)


def read_recipes(options: CompareOptions) -> list[Recipe]:
    """Returns the recipes of the options: the files, then the changes of the first one. Raises UserError for a file
    that is none."""
    assert options.out is not None
    recipes: list[Recipe] = []
    given = [(source.stem, source, ()) for source in options.sources]
    given += [(change, options.sources[0], (change,)) for change in options.changes]  # type: ignore[misc]
    for name, source, changes in given:
        parameters = Parameters.load(source, [*options.set_, *changes])
        while name in [each.name for each in recipes]:
            name += "'"
        folder = re.sub(r"[^\w.=-]+", "_", name)[:80]
        while folder in [each.folder.name for each in recipes]:
            folder += "_"
        recipes.append(Recipe(name, parameters, options.out / folder))
    return recipes


def _check(recipes: Sequence[Recipe]) -> list[str]:
    """Returns what readers should know of the pairs. Raises UserError where their losses are not alike."""
    first, notes = recipes[0], []
    for other in recipes[1:]:
        if type(first.parameters.objective) is not type(other.parameters.objective):
            raise UserError(
                f"{other.name}: has another objective than {first.name}: their losses cannot be compared; train them, "
                "and compare the models with --task"
            )
        changed = changed_keys(first.parameters, other.parameters)
        if not changed:
            raise UserError(f"{other.name}: is the same recipe as {first.name}; name another, or --change KEY=VALUE")
        notes.append(f"{other.name}: other values of {', '.join(changed)}")
        if unshared := [key for key in changed if key.startswith(NOT_SHARED)]:
            notes.append(f"{other.name}: {', '.join(unshared)}: its steps do not take the rows of {first.name}'s")
    return notes


def _losses(
    recipe: Recipe, like: Parameters, stores: Mapping[str, TokenStore], options: CompareOptions
) -> Mapping[str, Mapping[str, float]]:
    """Returns store -> score -> its value for the run of `recipe` with the seed of `like`, which is trained first where
    it has no such losses yet; `like` decides the rows and masks."""
    parameters = recipe.with_seed(like.seed)
    folder = recipe.folder / f"seed-{like.seed}"
    key: dict[str, Any] = json.loads(
        json.dumps(
            {
                "parameters": parameters.dump(),
                "measured as": {"objective": like.dump()["objective"], "length": like.data.sequence_length},
                "stores": {name: store.fingerprint for name, store in stores.items()},
                "limit": options.limit,
                "precision": options.precision,
            }
        )
    )
    file = folder / FOUND
    if file.is_file() and (kept := read_json(file)).get("of") == key:
        losses: Mapping[str, Mapping[str, float]] = kept["losses"]
        return losses
    result = train_in_this_process(parameters, folder, StartOptions(advice=explain_model_errors))
    if result.stopped_by:
        raise Stopped(f"{folder}: stopped at step {result.step} by {result.stopped_by}; the same command goes on")
    checkpoint = find_checkpoint(folder)
    device = find_device(options.device, precision=options.precision or "fp32")
    objective = RunObjective(checkpoint, read_manifest(checkpoint), device=device, precision=options.precision)
    if AVERAGE in plugins_in(checkpoint):
        load_weights(checkpoint, AVERAGE, objective.module)
    found = {}
    for name, store in stores.items():
        rows = measure_rows(objective, like, store, options.limit)
        found[name] = {score: rows.mean(weights) for score, weights in rows.scores()}
    write_text(file, json.dumps({"of": key, "losses": found}, ensure_ascii=False) + "\n")
    return found


def _differences(
    store: str, first: Recipe, other: Recipe, found: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]
) -> list[Difference]:
    """Returns the differences on a store, of pairs, and beside each what the same runs say if they are no pairs."""
    differences = []
    for score in found[first.name][0][store]:
        sides = [np.array([losses[store][score] for losses in found[each.name]]) for each in (first, other)]
        paired, unpaired = paired_t(*sides), unpaired_t(*sides)
        runs = None
        if paired.deviation and unpaired.deviation is not None:
            runs = (unpaired.deviation / paired.deviation) ** 2
        further = {"seeds": [side.tolist() for side in sides], "fewer_runs": runs}
        for test, method in ((paired, "paired t"), (unpaired, "unpaired t")):
            if method == "unpaired t" and len(sides[0]) == 1:
                continue
            differences.append(
                Difference(
                    store, score, (first.name, other.name), (float(sides[0].mean()), float(sides[1].mean())), test,
                    f"{len(sides[0])} seeds", method, larger_is_better=score.endswith("accuracy"),
                    further=further if method == "paired t" else {},
                )
            )  # fmt: skip
    return [each for each in differences if math.isfinite(each.test.difference)] or differences
