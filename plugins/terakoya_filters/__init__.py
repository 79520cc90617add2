"""What this family adds: cleaning steps that judge a document by its language, its words and its lines, and those of
datatrove and HojiChar. See README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.components import CleaningStep


@hookimpl
def register_cleaning_steps() -> Mapping[str, type[CleaningStep]]:
    """Implements `terakoya.hookspecs.register_cleaning_steps`."""
    from terakoya_filters.boilerplate import Boilerplate
    from terakoya_filters.kana import Kana
    from terakoya_filters.language import LanguageStep
    from terakoya_filters.lines import Lines
    from terakoya_filters.markup import Markup
    from terakoya_filters.others import Datatrove, Hojichar
    from terakoya_filters.repetition import Repetition

    return {
        "language": LanguageStep,
        "repetition": Repetition,
        "boilerplate": Boilerplate,
        "lines": Lines,
        "kana": Kana,
        "markup": Markup,
        "datatrove": Datatrove,
        "hojichar": Hojichar,
    }
