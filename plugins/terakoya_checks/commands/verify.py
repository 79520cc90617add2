"""`terakoya verify` and `terakoya store verify` read all of a folder, and say whether it is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command


def command(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A run, a checkpoint, a token store or a model folder; or the address of a run or a store.",
            metavar="RUN|STORE|MODEL",
        ),
    ],
) -> None:
    """Read a whole run, checkpoint, token store or model, and recompute its hashes. Exits with 2 if it finds a fault.

    Of a run: every checkpoint, its files, its manifest, its tensors, and metrics.jsonl. Of a model: that
    its files are those which `export` wrote, that it loads, that its numbers are finite, that its tokenizer fits.
    Changes nothing.
    """
    from terakoya.errors import UserError
    from terakoya.folder_kinds import kind_of
    from terakoya.log import console, plural
    from terakoya.places import is_local
    from terakoya.store.token_store import read_facts
    from terakoya_checks.verify import verify

    findings = verify(folder)
    for line in (*findings.checked, *findings.problems):
        console().print(line, markup=False, soft_wrap=True)
    if findings.problems:
        number = len(findings.problems)
        text = f"{folder}: {number} problem{plural(number)}, listed above"
        # of a run whose own checkpoints are whole, the copy of one that is damaged
        where = findings.damaged[0] if kind_of(folder) == "run" and findings.has_copies_alone() else folder
        raise UserError(text if not is_local(folder) else f"{text}\n{next_command.after_damage(where)}")
    kind = kind_of(folder)
    if not is_local(folder):
        return
    if kind == "run":
        next_command.after_run(folder)
    elif kind == "checkpoint":
        next_command.show(*next_command.export_words(folder))
    elif kind == "token store":
        next_command.after_store(folder, read_facts(folder))
    else:
        next_command.show(*next_command.upload_words(folder))


def store_command(store: Annotated[Path, typer.Argument(help="The store's folder.", metavar="STORE")]) -> None:
    """Read a whole store and check its hashes, tokenizer, packing plans, index and ids. Exits with 2 if it finds a
    fault."""
    from terakoya.errors import UserError
    from terakoya.log import console, plural
    from terakoya.store.token_store import count_store, read_facts
    from terakoya_checks.verify_store import verify

    faults = verify(store)
    for fault in faults:
        console().print(fault, markup=False, soft_wrap=True)
    if faults:
        text = f"{store}: {len(faults)} problem{plural(len(faults))}, listed above"
        raise UserError(f"{text}\n{next_command.after_damage(store)}")
    counted = count_store(store)
    console().print(f"{store}: sound; {counted.tokens:,} tokens checked", markup=False, soft_wrap=True)
    next_command.after_store(store, read_facts(store))
