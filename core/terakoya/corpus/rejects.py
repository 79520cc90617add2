"""What of a corpus is no document: counted by file and reason, told, and limited."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Self

from terakoya.corpus.documents import REMEDIES, Document, Reject
from terakoya.errors import UserError

logger = logging.getLogger("terakoya")

_NAMED_FILES = 3


def allowed_rejects(max_rejects: int | float, documents: int) -> float:
    """Returns how many of `documents` may be rejected: `max_rejects` is a count (int) or a share (float)."""
    return max_rejects * documents if isinstance(max_rejects, float) else max_rejects


def has_many_rejects(rejected: Mapping[str, int], documents: int, max_rejects: int | float) -> bool:
    """Returns whether more is `rejected`, by reason, beside `documents` than `max_rejects` allows. Empty documents do
    not count: tables have blank cells, and nothing is lost with them."""
    total = sum(rejected.values())
    return total - rejected.get("empty document", 0) > allowed_rejects(max_rejects, documents + total)


def describe_rejects(rejected: Mapping[str, int], documents: int) -> str:
    """Describes what is `rejected` beside `documents`, with counts by reason."""
    ordered = sorted(rejected.items(), key=lambda each: -each[1])
    total = sum(rejected.values())
    return f"{total:,} of {documents + total:,} documents ({', '.join(f'{count:,} {name}' for name, count in ordered)})"


class Rejects:
    """Counts of documents and of rejects, by file and reason; picklable."""

    def __init__(self, documents: int = 0) -> None:
        self.documents = documents
        self._counts: Counter[tuple[str, str]] = Counter()
        self._first: dict[str, Reject] = {}

    def add(self, item: Document | Reject) -> bool:
        """Counts `item`; returns whether it is a reject."""
        if isinstance(item, Document):
            self.documents += 1
            return False
        self._counts[str(item.file), item.reason] += 1
        self._first.setdefault(item.reason, item)
        return True

    def update(self, other: Self) -> None:
        """Adds the counts of `other`, which comes after this in the corpus."""
        self.documents += other.documents
        self._counts.update(other._counts)
        self._first = other._first | self._first

    @property
    def total(self) -> int:
        """The number of rejects."""
        return self._counts.total()

    @property
    def by_reason(self) -> dict[str, int]:
        """The number of rejects for each reason."""
        counts: Counter[str] = Counter()
        for (_, reason), count in self._counts.items():
            counts[reason] += count
        return dict(counts)

    def check(self, max_rejects: int | float) -> None:
        """Raises UserError if more than `max_rejects` are rejected, or all; else tells of them, if any."""
        rejected = self.by_reason
        if rejected and (not self.documents or has_many_rejects(rejected, self.documents, max_rejects)):
            raise UserError(self.explain(max_rejects))
        self.tell()

    def tell(self) -> None:
        """Logs a warning that names the rejects by reason and file, if there are any."""
        if self._counts:
            _warn(describe_rejects(self.by_reason, self.documents), self._files())

    def explain(self, max_rejects: int | float, *, note: str = "", further: Mapping[str, str] | None = None) -> str:
        """Says what was expected, what is rejected in which files, and what to do; `note` is another remedy, `further`
        has those of further reasons."""
        rejected = self.by_reason
        most = max(rejected, key=lambda reason: (reason != "empty document", rejected[reason]))
        first = self._first[most]
        known = {**REMEDIES, **(further or {})}
        remedies = [known[most], "or correct the corpus"] if most in known else ["correct the corpus"]
        expected = "at least one document that is not rejected"
        if self.documents:
            allowed = allowed_rejects(max_rejects, self.documents + self.total)
            expected = f"at most {int(allowed):,} rejected documents (--max-rejects {max_rejects})"
            remedies.append(note or "or allow more")
        return (
            f"expected {expected}, got {describe_rejects(rejected, self.documents)}, the first in {first.file}, line "
            f"{first.line}: {' '.join(first.excerpt.split())}\n{self._files()}\n{'; '.join(remedies)}"
        )

    def _files(self) -> str:
        """Names the files with the most rejects."""
        files: Counter[str] = Counter()
        for (file, _), count in self._counts.items():
            files[file] += count
        lines = []
        for name, _ in files.most_common(_NAMED_FILES):
            counts = [f"{count:,} {reason}" for (file, reason), count in self._counts.items() if file == name]
            lines.append(f"rejected in {name}: {', '.join(counts)}")
        more = len(files) - len(lines)
        return "\n".join([*lines, *([f"and in {more:,} more files"] if more else [])])


@cache  # a look at the beginning of a small corpus sees what the pass over all of it sees again
def _warn(counts: str, files: str) -> None:
    logger.warning("rejected %s\n%s", counts, files)
