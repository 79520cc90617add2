"""What this family adds: cleaning steps that keep personal data, words of a list and test sets out. See README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.components import CleaningStep


@hookimpl
def register_cleaning_steps() -> Mapping[str, type[CleaningStep]]:
    """Implements `terakoya.hookspecs.register_cleaning_steps`."""
    from terakoya_screening import steps

    return {"personal_data": steps.PersonalData, "words": steps.Words, "decontaminate": steps.Decontaminate}
