"""Compares models, runs or recipes: chooses how, by what they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.folder_kinds import kind_of
from terakoya.runs.finding import names_checkpoint
from terakoya_compare.options import CompareOptions
from terakoya_compare.result import Comparison


def compare(sources: Sequence[Path], **options: Any) -> Comparison:
    """Compares the first of `sources` with each of the others; `options` are the other fields of `CompareOptions`.

    Raises:
        UserError: the sources, the text and the tasks do not fit together.
        Stopped: a run of a recipe was stopped; the same call goes on with it.
    """
    return compare_sources(CompareOptions(sources=sources, **options))


def compare_sources(options: CompareOptions) -> Comparison:
    """Does what `options` say, as `compare`."""
    recipes = [_is_recipe(source) for source in options.sources]
    if any(recipes) and not all(recipes):
        names = {is_recipe: source for source, is_recipe in zip(options.sources, recipes, strict=True)}
        raise UserError(
            f"{names[True]} is a parameter file, {names[False]} a model or a run: compare models with models, or "
            "recipes with recipes"
        )
    if len(options.sources) + len(options.changes) < 2:
        raise UserError(f"{options.sources[0]}: expected something to compare it with: name two models or recipes")
    if all(recipes):
        if options.tasks or options.corpus or options.data:
            raise UserError("--task, --corpus and --data: are for models; compare the runs that recipes leave in --out")
        from terakoya_compare.recipes import compare_recipes

        return compare_recipes(options)
    given = {"--change": options.changes, "--set": options.set_, "--out": options.out}
    if wrong := [name for name, value in given.items() if value]:
        raise UserError(f"{', '.join(wrong)}: for parameter files alone; {options.sources[0]} is a model or a run")
    if options.tasks:
        if options.stores or options.corpus:
            raise UserError("--task: not together with --validation and --corpus; give two commands")
        from terakoya_compare.tasks import compare_tasks

        return compare_tasks(options)
    if options.seeds or options.data:
        raise UserError("--seeds and --data: for --task and parameter files alone; a loss has no seed")
    from terakoya_compare.models import compare_models

    return compare_models(options)


def _is_recipe(source: Path) -> bool:
    """Returns whether `source` is a parameter file or the name of a preset, and no model or run."""
    if source.is_file():
        return True
    from terakoya.config.presets import preset_names

    return kind_of(source) is None and not names_checkpoint(source) and str(source) in preset_names()
