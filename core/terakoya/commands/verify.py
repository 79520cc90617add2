"""`terakoya verify`: reads all of a run, a checkpoint, a token store or a model, and says whether it is sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[
        Path,
        typer.Argument(help="A run, a checkpoint, a token store or a model folder.", metavar="RUN|STORE|MODEL"),
    ],
) -> None:
    """Read a whole run, checkpoint, token store or model, and recompute its hashes. Exits with 2 if it finds a fault.

    Of a run: every checkpoint, its files, its manifest, its tensors, and metrics.jsonl. Of a model: that
    its files are those which `export` wrote, that it loads, that its numbers are finite, that its tokenizer fits.
    Changes nothing.
    """
    from terakoya.conversion.verify import verify
    from terakoya.errors import UserError
    from terakoya.log import console

    findings = verify(folder)
    for line in (*findings.checked, *findings.problems):
        console().print(line, markup=False, soft_wrap=True)
    if findings.problems:
        number = len(findings.problems)
        raise UserError(f"{folder}: {number} problem{'s' if number > 1 else ''}, listed above")
