"""The cleaning step `example`: documents of few different characters are dropped."""

from __future__ import annotations

from pydantic import NonNegativeInt
from terakoya import hookimpl
from terakoya.components import CleaningStep


class Example(CleaningStep):
    """Writes spaces for tabs, and drops documents of few different characters."""

    min_different: NonNegativeInt = 3
    """The number of different characters with which a document stays."""

    def change(self, text: str) -> str:
        return text.replace("\t", " ")

    def keeps(self, text: str) -> bool:
        return len(set(text)) >= self.min_different

    def why(self, text: str) -> str:
        return f"{len(set(text))} different characters"


@hookimpl
def register_cleaning_steps() -> dict[str, type[CleaningStep]]:
    """Registers `example`: the list `clean` may have {"type": "example"}."""
    return {"example": Example}
