"""`terakoya store info` and `terakoya store count` describe token stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.log import console, translated

Store = Annotated[Path, typer.Argument(help="The store's folder.", metavar="STORE")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def info(store: Store, json: Json = False) -> None:
    """Show what a store holds and what it was made from."""
    from rich.table import Table

    from terakoya.store.recorded_options import UNKNOWN
    from terakoya.store.token_store import open_store

    opened = open_store(store)
    facts = opened.facts
    if json:
        console().print(facts.model_dump_json(indent=2), markup=False, soft_wrap=True)
        return
    unknown = facts.notes.get(UNKNOWN)
    table = Table(show_header=False, box=None)
    rows: dict[str, object] = {
        "store": opened.name,
        "documents": f"{facts.documents:,}",
        "sequences": f"{facts.sequences:,} (a {facts.unit} each)",
        "tokens": f"{facts.tokens:,} {facts.dtype}",
        **({UNKNOWN: f"{unknown:,} ({100 * unknown / facts.tokens:.3f} %)"} if unknown else {}),
        "characters per token": "not known" if (text := opened.text_per_token) is None else f"{text.characters:.3f}",
        "vocabulary": f"{facts.vocabulary.size:,}",
        "end of document": "not stored" if facts.eos is None else f"id {facts.eos}",
        "word starts": "stored" if facts.word_starts else "not known",
        **({"tokens of answers": f"{opened.learned_tokens:,}"} if facts.learned else {}),
        **{f"  {note}": f"{number:,}" for note, number in facts.notes.items() if note != UNKNOWN},
        "rejected": f"{facts.rejected:,}",
        **{f"  {reason}": f"{number:,}" for reason, number in facts.rejected_by_reason.items()},
        **{f"literal {token}": f"{number:,}" for token, number in facts.literals.items()},
        **{f"{translated('option')} {name}": value for name, value in facts.options.items()},
        **{f"made from {name}": value for name, value in facts.inputs.items()},
        "fingerprint": facts.fingerprint,
    }
    for name, value in rows.items():
        shown = str(value) if name == "store" else translated(str(value))
        table.add_row(translated(name).replace("[", "\\["), shown.replace("[", "\\["))
    console().print(table)
    next_command.after_store(store, facts)


def count(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", show_default=False)], json: Json = False
) -> None:
    """Count documents, sequences and tokens, from headers alone. Several stores give a table."""
    import orjson
    from rich.table import Table

    from terakoya.store.token_store import count_store, read_facts

    names = ("documents", "sequences", "tokens")
    all_counts = [(str(store), count_store(store)) for store in stores]
    counted = [(store, {name: getattr(counts, name) for name in names}) for store, counts in all_counts]
    if json:
        shown: object = dict(counted) if len(counted) > 1 else counted[0][1]
        console().print(orjson.dumps(shown).decode(), markup=False, soft_wrap=True)
        return
    if len(counted) == 1:
        for name, number in counted[0][1].items():
            console().print(f"{translated(name)} {number}")
        next_command.after_store(stores[0], read_facts(stores[0]))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("store")
    for name in counted[0][1]:
        table.add_column(name, justify="right")
    for store, numbers in counted:
        table.add_row(store.replace("[", "\\["), *(f"{number:,}" for number in numbers.values()))
    console().print(table)
    next_command.show("store", "info", stores[0])
