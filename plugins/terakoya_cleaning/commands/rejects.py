"""`--rejects` of the verbs that take `--clean`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from terakoya.errors import UserError


def list_rejects(
    verb: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
    rejects: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --clean: list dropped documents: step, reason, file, line.", show_default=False
        ),
    ] = None,
    rejects_text: Annotated[
        bool, typer.Option("--rejects-text", help="With --rejects: the text as well; one more pass over the corpus.")
    ] = False,
) -> None:
    """Runs the verb; its cleaning writes the list to `rejects` as soon as it has decided."""
    if rejects is None:
        if rejects_text:
            raise UserError("--rejects-text: expected --rejects FILE as well, the list that gets the text")
        verb(**arguments)
        return

    from terakoya_cleaning.rejects import check_list, listing_to

    if arguments["options"].clean is None:
        raise UserError("--rejects: expected --clean as well; the list has what its steps drop")
    check_list(rejects)
    with listing_to(rejects, with_text=rejects_text):
        verb(**arguments)
