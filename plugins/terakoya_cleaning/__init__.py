"""What this family adds: cleaning steps, and the plan of a cleaning. See README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from terakoya import Command, hookimpl

if TYPE_CHECKING:
    from terakoya.components import CleaningStep
    from terakoya.corpus.cleaning import AddCleaning


@hookimpl
def register_commands() -> Mapping[str, Command]:
    from terakoya_cleaning.commands import clean

    example = "terakoya clean corpus/*.jsonl.gz --clean clean.json --out work/clean"
    return {"clean": Command(clean.command, example, after="prepare")}


@hookimpl
def register_options() -> Mapping[str, Callable[..., None]]:
    """Adds `--rejects` to the verbs that take `--clean`."""
    from terakoya_cleaning.commands.rejects import list_rejects

    return dict.fromkeys(("prepare", "tokenizer train", "tokenizer count"), list_rejects)


@hookimpl
def register_cleaning_steps() -> Mapping[str, type[CleaningStep]]:
    """Implements `terakoya.hookspecs.register_cleaning_steps`."""
    from terakoya_cleaning import steps

    return {
        "nfkc": steps.Nfkc,
        "sentences": steps.Sentences,
        "length": steps.Length,
        "characters": steps.Characters,
        "exact_duplicates": steps.ExactDuplicates,
        "near_duplicates": steps.NearDuplicates,
        "hold_out": steps.HoldOut,
    }


@hookimpl
def read_cleaning(clean: Any, source: str) -> AddCleaning:
    """Implements `terakoya.hookspecs.read_cleaning`."""
    from terakoya_cleaning.plan import add_cleaning
    from terakoya_cleaning.reading import load_steps

    steps = load_steps(clean, source)
    return lambda corpus, folder, held_out: add_cleaning(corpus, steps, folder, held_out=held_out)
