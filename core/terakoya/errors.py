"""Errors that a user can act on, in one shape: where, what was expected, what was got, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend. The command line prints the message without a traceback and exits with 2."""

    exit_code = 2


class Stopped(UserError):  # noqa: N818 - no error, though it ends the command
    """Training was asked to stop, and saved: whoever needs its end has to begin again. The command line exits with 75
    (EX_TEMPFAIL)."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str:
    """`name`'s nearest known names as a sentence's end, or the known names when none is near.

    Returns for example `; did you mean "hidden_size"?` or `; known: "bert", "electra"`.
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(f'"{near}"' for near in close) + "?"
    return "; known: " + ", ".join(f'"{each}"' for each in known) if known else ""
