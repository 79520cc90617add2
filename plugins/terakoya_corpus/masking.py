"""Text as a page may show it: without what may be personal data."""

from __future__ import annotations

import re
from collections.abc import Callable

from terakoya.plugins import registry

_MAIL = re.compile(r"[\w.+\-]+[@＠][\w\-]+(?:[.．][\w\-]+)+")
_DIGITS = re.compile(r"\d(?:[-‐−－ー() （）.]?\d){5,}")
SHOWN_CHARACTERS = 160
_LOOKED_AT = 1024

Mask = Callable[[str], str]


def find_mask() -> Mask:
    """Returns what masks a text: mail addresses, runs of six digits and more, and what the step `personal_data` finds,
    where there is one."""
    step = personal_data_step()
    shows = getattr(step, "show", str)

    def mask(text: str) -> str:
        return _DIGITS.sub("[DIGITS]", _MAIL.sub("[MAIL]", shows(text)))

    return mask


def personal_data_step() -> object | None:
    """Returns the cleaning step `personal_data` with its default settings, None where no plugin has one."""
    found = registry()
    return (
        found.component("cleaning_steps", "personal_data")()
        if "personal_data" in found.names("cleaning_steps")
        else None
    )


def excerpt(text: str, mask: Mask) -> str:
    """Returns the beginning of `text` in one line, masked before it is cut."""
    shown = " ".join(mask(text[:_LOOKED_AT]).split())
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}…"
