"""`terakoya store merge` and `terakoya store split` make stores from stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError
from terakoya.log import console, plural

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts


def parse_weights(text: str) -> list[int]:
    """Parses weights such as `998,1,1`. Raises UserError for anything else."""
    weights = [weight.strip() for weight in text.split(",")]
    if not all(weight.isdecimal() for weight in weights):
        raise UserError(f'--parts: expected weights such as 998,1,1, got "{text}"')
    return [int(weight) for weight in weights]


def merge_command(
    stores: Annotated[list[Path], typer.Argument(help="The stores, in order.", metavar="STORE STORE...")],
    out: Annotated[Path, typer.Option(help="The new store's folder.")],
    word_starts: Annotated[bool, typer.Option(help="Keep word starts; all stores or none must have them.")] = True,
) -> None:
    """Merge stores of one tokenizer; the shards of `prepare --shard` become the store of the whole corpus."""
    from terakoya_stores.merge import merge

    facts = merge(stores, out, word_starts=word_starts)
    _print_facts(out, facts)
    next_command.after_store(out, facts)


def split_command(
    store: Annotated[Path, typer.Argument(help="The store's folder.", metavar="STORE")],
    parts: Annotated[str, typer.Option(help="Weights of the parts, such as 998,1,1.")],
    out: Annotated[list[Path], typer.Option(help="A new store's folder, once for each part.")],
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
) -> None:
    """Split a store's documents among new stores; equal documents always go to the same store."""
    from terakoya_stores.split import split

    made: list[tuple[int, Path, StoreFacts]] = []
    for folder, facts in zip(out, split(store, out, weights=parse_weights(parts), seed=seed), strict=True):
        _print_facts(folder, facts)
        made.append((facts.tokens, folder, facts))
    made.sort(key=lambda each: -each[0])
    (_, train, facts), *others = made
    next_command.after_store(train, facts, validation=others[0][1] if others else None)


def _print_facts(out: Path, facts: StoreFacts) -> None:
    console().print(
        f"{out}: {facts.documents:,} document{plural(facts.documents)}, "
        f"{facts.sequences:,} sequence{plural(facts.sequences)}, {facts.tokens:,} tokens",
        soft_wrap=True,
        markup=False,
    )
