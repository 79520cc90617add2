"""Positions of parts of a text, which files count in characters or, as JavaScript does, in UTF-16 units."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from terakoya.json_settings import short_json
from terakoya_quality.finetuning.rows import Row

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class Part:
    """The characters [start, stop) of the text in the column `within` of `row`.

    Attributes:
        own: the part itself, where its file has it beside the positions; it gives `stop` where that is None.
        kind: what it is, if it has a type.
    """

    row: Row
    within: str
    start: int
    stop: int | None
    own: str | None = None
    kind: str = ""

    @property
    def end(self) -> int:
        """The position after the last character."""
        return self.start + len(self.own or "") if self.stop is None else self.stop

    @property
    def is_there(self) -> bool:
        """Whether there are such positions, and the part's own text stands at them."""
        text = self.row.text(self.within)
        inside = 0 <= self.start < self.end <= len(text)
        return inside and self.own in (None, text[self.start : self.end])

    def from_utf16(self) -> Part:
        """Returns the part with its positions in characters, if they are in UTF-16 units."""
        units = self.row.text(self.within).encode("utf-16-le")

        def characters(at: int) -> int:
            return len(units[: 2 * max(0, at)].decode("utf-16-le", "ignore"))

        stop = None if self.stop is None else characters(self.stop)
        return replace(self, start=characters(self.start), stop=stop)


def in_characters(column: str, found: Sequence[Sequence[Part]]) -> Sequence[Sequence[Part]]:
    """Returns the parts that the `column` of each row has, as they are, or read in UTF-16 units where only that gives
    each its own text, which is logged. Raises UserError for a part that does not stand where it says."""
    wrong = [part for parts in found for part in parts if not part.is_there]
    if not wrong:
        return found
    converted = [[part.from_utf16() for part in parts] for parts in found]
    if any(part.own is not None for part in wrong) and all(part.is_there for parts in converted for part in parts):
        logger.warning(
            "%s: %s: positions are read as UTF-16 units, as JavaScript counts: %s of %s fit their text only so",
            wrong[0].row.file,
            column,
            f"{len(wrong):,}",
            f"{sum(map(len, found)):,}",
        )
        return converted
    first = wrong[0]
    if first.own is None:
        length = len(first.row.text(first.within))
        first.row.refuse(
            f"{column}: expected positions within the {length:,} characters, got {first.start} to {first.end}"
        )
    first.row.refuse(f"{column}: {short_json(first.own)} does not stand at {first.start} of the {first.within}")
