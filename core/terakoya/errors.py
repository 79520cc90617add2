"""Errors that a user can fix. Every message has the same shape: where, what was expected, what was got, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix. The command line prints the message without a traceback and exits with 2."""

    exit_code = 2


class Stopped(UserError):  # noqa: N818 - not an error, though it ends the command
    """Training stopped on request and saved a checkpoint; the same command resumes it. The command line exits with 75
    (EX_TEMPFAIL)."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known names nearest to `name`, or all known names if none is near, as the end of a sentence:
    `; did you mean "hidden_size"?` or `; known: "bert", "electra"`."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(f'"{near}"' for near in close) + "?"
    return "; known: " + ", ".join(f'"{each}"' for each in known) if known else ""
