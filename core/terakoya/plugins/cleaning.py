"""The cleaning of a corpus, by the plugin that has the hook `read_cleaning`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.corpus.cleaning import AddCleaning
from terakoya.errors import UserError
from terakoya.places import check_local
from terakoya.plugins.loading import registry

if TYPE_CHECKING:
    from terakoya.corpus.cleaning import StepsOrFile
    from terakoya.corpus.corpus import Corpus


def read_cleaning(clean: Any, source: str = "clean") -> AddCleaning:
    """Returns what adds the cleaning of `clean` to a corpus: of a file, or of a list that errors call `source`. Raises
    UserError for a missing file, for wrong steps, and if no plugin cleans."""
    for _, listener in registry().called["read_cleaning"]:
        for add in listener(clean=clean, source=source):
            return add
    raise UserError(f"{source}: no plugin cleans documents{registry().missing('hooks', 'read_cleaning')}")


def plan_folder(out: Path) -> Path:
    """Returns the folder of the cleaning plan of a corpus from which `out` is made, where none is given."""
    return out.with_name(f"{out.name}.clean")


def clean_corpus(
    corpus: Corpus, clean: StepsOrFile | None, folder: Path | None, *, out: Path, processes: int, held_out: bool = False
) -> Corpus:
    """Makes the cleaning plan and returns `corpus` after the steps `clean`; `corpus` itself if there are none.

    The result is without the documents that a step `hold_out` holds out; with `held_out` it is only those. The plan is
    in `folder`, by default `OUT.clean` next to `out`; an existing plan is used again.

    Raises UserError for `held_out` without the step `hold_out`, for a folder without steps, and as `read_cleaning`.
    """
    if clean is None:
        if held_out:
            raise UserError('--held-out: expected --clean with a step {"type": "hold_out", "share": ...}')
        if folder is not None:
            raise UserError("--clean-folder: expected --clean as well; the folder keeps what its steps decide")
        return corpus
    add = read_cleaning(clean)
    if folder is not None:
        check_local(folder, "the folder of the cleaning plan")
    corpus = add(corpus, folder or plan_folder(out), held_out)
    assert corpus.cleaning is not None, "it was added"
    corpus.cleaning.make_plan(corpus, processes=processes)
    return corpus
