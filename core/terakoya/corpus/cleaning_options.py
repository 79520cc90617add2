"""Cleaning as commands and pipelines ask for it: steps from a list or a file, their plan made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.corpus.cleaning import Step
    from terakoya.corpus.corpus import Corpus


Clean = Path | Sequence[Mapping[str, Any]]
"""Cleaning steps, or a JSON file with a list of them."""


def read_clean(clean: Clean | None) -> tuple[Step, ...]:
    """The steps of `clean`, none if it is None.

    Raises UserError for a file that is not there and for wrong steps, each by its number.
    """
    from terakoya.corpus.cleaning import read_steps

    if clean is None:
        return ()
    if not isinstance(clean, Path):
        return read_steps(list(clean), source="clean")
    try:
        value = json.loads(clean.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{clean}: no such file; expected a JSON list of cleaning steps") from None
    except ValueError as error:
        raise UserError(f"{clean}: expected a JSON list of cleaning steps, got something else ({error})") from error
    return read_steps(value, source=clean.name)


def cleaned(
    corpus: Corpus, steps: Sequence[Step], folder: Path | None, *, out: Path, processes: int, held_out: bool = False
) -> Corpus:
    """`corpus` after `steps`, without what a step `hold_out` sets aside, or with `held_out` that alone.

    Which documents are dropped is decided now, unless it is noted already in `folder`, by default `OUT.clean` beside
    `out`. Raises UserError for `held_out` without that step, and for a folder without steps.
    """
    from terakoya.corpus import cleaning_plan

    if not steps:
        if held_out:
            raise UserError('--held-out: expected --clean with a step {"type": "hold_out", "share": ...}')
        if folder is not None:
            raise UserError("--clean-folder: expected --clean with it, the steps whose decisions it notes")
        return corpus
    corpus = cleaning_plan.cleaned(corpus, steps, folder or out.with_name(f"{out.name}.clean"), held_out=held_out)
    cleaning_plan.make_plan(corpus, processes=processes)
    return corpus
