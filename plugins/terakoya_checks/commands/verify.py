"""`terakoya verify` and `terakoya store verify` read all of a folder, and say whether it is sound."""

from __future__ import annotations

import shlex
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
        raise UserError(text if not is_local(folder) else f"{text}\n{_after_damage(where)}")
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
        raise UserError(f"{text}\n{_after_damage(store)}")
    counted = count_store(store)
    console().print(f"{store}: sound; {counted.tokens:,} tokens checked", markup=False, soft_wrap=True)
    next_command.after_store(store, read_facts(store))


def _after_damage(folder: Path) -> str:
    """Returns the line that says what to do with a run, checkpoint, store or model in which faults were found. A
    checkpoint that is not in `checkpoints/`, such as `model-best`, is a copy, from which no run continues."""
    from terakoya.folder_kinds import kind_of
    from terakoya.runs import status

    kind = kind_of(folder)
    run = folder.parent.parent if kind == "checkpoint" else folder
    if kind == "run" and status.read(folder).checkpoints_gone:
        return f"next: bring the checkpoints of {folder} back from a copy, or train again in another --out"
    if kind == "checkpoint" and folder.absolute().parent.name != "checkpoints":
        return f"next: restore {folder} from a copy, or remove it and take another checkpoint; its run does not need it"
    if kind in ("run", "checkpoint"):
        words = next_command.train_words(run)
        again = next_command.line(*words) if words else "next: the command that started the run"
        return f"{again}, which sets damaged checkpoints aside and continues from the newest whole one"
    if kind == "token store":
        return (
            f"next: restore {folder} from a copy; or remove it and give the command that made it again, such as "
            f"terakoya prepare (`terakoya store info {shlex.quote(str(folder))}` shows the options, if it is readable)"
        )
    return f"next: restore {folder} from a copy, or remove it and export it again: terakoya export RUN --out MODEL"
