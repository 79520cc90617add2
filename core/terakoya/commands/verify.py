"""`terakoya verify`: reads all of a run, a checkpoint, a token store or a model, and says whether it is sound."""

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
    from terakoya.conversion.verify import verify
    from terakoya.errors import UserError
    from terakoya.folder_kinds import kind_of
    from terakoya.log import console, plural
    from terakoya.places import is_local
    from terakoya.store.token_store import read_facts

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
