"""Keys of other programs' formats: which a reader reads, which mean nothing to training, and which it refuses.

A key that would change what is trained is honoured by its reader, or refused here. One that nobody here knows is told
with a count. Each reader has a table of the keys of its kinds of objects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from terakoya.corpus.documents import Reason

HARMLESS = (
    "id idx index uuid guid hash source dataset lang language url title category topic domain license meta metadata "
    "created created_at timestamp date author model score quality"
)
"""Keys, with spaces between them, that describe an example and mean nothing to training, in any format."""
TWO_FORMS = "two forms of one example"
NOTHING = frozenset({"", "none", "null", "nan", "[]", "{}", "false"})
"""Values that say nothing, as text in lower case."""


class RefusedKeyError(Exception):
    """An object has a key that would change what is trained, and that its reader does not read."""

    def __init__(self, key: str, reason: Reason) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


@dataclass(frozen=True)
class KnownKeys:
    """The keys of one kind of object.

    Attributes:
        read: the keys that the reader reads, patterns with spaces between them.
        refused: keys with spaces between them -> what they hold.
        harmless: keys that mean nothing here, besides `HARMLESS`.
        one_of: keys with spaces between them, of which one at most may hold something.
        defaults: what a refused key may hold, where that is not `NOTHING`.
    """

    read: str
    refused: Mapping[str, Reason] = field(default_factory=dict)
    harmless: str = ""
    one_of: tuple[str, ...] = ()
    defaults: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def refused_keys(self) -> dict[str, Reason]:
        """Each refused key -> what it holds."""
        return {key: reason for keys, reason in self.refused.items() for key in keys.split()}

    @cached_property
    def _quiet(self) -> re.Pattern[str]:
        return re.compile("|".join(f"{self.read} {self.harmless} {HARMLESS}".split()))

    def unread(self, value: Mapping[str, Any]) -> list[str]:
        """Returns the keys of `value` that hold something and that nobody here knows. Raises RefusedKeyError."""
        found = []
        for key in value:
            reason = self.refused_keys.get(key)
            if reason is None and self._quiet.fullmatch(key):
                continue
            if not _is_in(value[key], self.defaults.get(key, NOTHING)):
                if reason is not None:
                    raise RefusedKeyError(key, reason)
                found.append(key)
        for keys in self.one_of:
            held = [key for key in keys.split() if not _is_in(value.get(key), NOTHING)]
            if len(held) > 1:
                raise RefusedKeyError(held[1], TWO_FORMS)
        return found


def _is_in(value: Any, texts: Collection[str]) -> bool:
    return str(value).strip().lower() in texts
