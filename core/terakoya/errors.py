"""Errors that a user can fix. Every message has the same shape: where, what was expected, what was got, what to do."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from importlib import import_module
from typing import Any


class UserError(Exception):
    """An error that the user can fix. The command line prints the message without a traceback and exits with 2. Where
    it `leaves_at_once`, the process ends without Python's own end, which would wait for threads of torch that wait for
    other processes, or abort."""

    exit_code = 2
    leaves_at_once = False


class Stopped(UserError):  # noqa: N818 - not an error, though it ends the command
    """Training stopped on request and saved a checkpoint; the same command resumes it. The command line exits with 75
    (EX_TEMPFAIL)."""

    exit_code = 75


class Diverged(UserError):  # noqa: N818 - a state of the training
    """Training has diverged: the same command fails at the same step again, whatever machine runs it. The command line
    exits with 3."""

    exit_code = 3


LASTING_EXIT_CODES = (UserError.exit_code, Diverged.exit_code)
"""Exit codes of failures that come again however often a run is started: a user has to change something first."""


class RollingBack(Exception):  # noqa: N818 - no failure
    """A run goes back to a checkpoint from before a spike of its loss, and continues from there."""


class TemporaryFailure(UserError):  # noqa: N818 - named for what it says of the failure
    """Something that may pass, such as a file system that does not answer; nothing was changed. The command line exits
    with 74 (EX_IOERR), after which launchers start a run again."""

    exit_code = 74


class FileError(UserError):
    """A file could not be read or written, because of the disk and not of what was asked for.

    Attributes:
        happened: the message without the advice at its end.
        advice: what to do; see `os_error_advice`.
        errno: the system's number for it.
        exit_code: see `os_error_exit_code`.
    """

    def __init__(self, happened: str, number: int | None = None) -> None:
        self.errno, self.exit_code = number, os_error_exit_code(number)
        self.happened, self.advice = happened, os_error_advice(number)
        super().__init__(happened + self.advice)


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space and give the same command again"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "check the disk or file server and give the same command again"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "choose a place that you may write to"),
    errno.ENOLCK: "mount this file system with locks (-o flock on Lustre, without -o nolock on NFS, for one machine "
    "alone -o localflock or local_lock=all), or choose a place on another one",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or choose a file system that takes larger files",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


_MAY_PASS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENETUNREACH)


def os_error_exit_code(number: int | None) -> int:
    """Returns the exit code after a system error with this number: 74 where a disk or file server does not answer,
    which may pass, else 2."""
    return TemporaryFailure.exit_code if number in _MAY_PASS else UserError.exit_code


def os_error_advice(number: int | None) -> str:
    """Returns what to do after a system error with this number, as the end of a sentence; "" where only the user can
    know."""
    return f"; {_ADVICE[number]}" if number in _ADVICE else ""


def describe_error(error: BaseException) -> str:
    """Returns the text of `error`, with its type where it is none that the user can fix."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def describe_os_error(error: OSError) -> str:
    """Returns where a system error happened, what it was and what to do."""
    place = error.filename2 or error.filename
    where = "" if place is None else f"{place}: "
    return f"{where}{error.strerror or error}{os_error_advice(error.errno)}"


class RankLostError(UserError):
    """Another process of the run hangs or is gone; the message names it. The command line exits with 76 (EX_PROTOCOL),
    after which launchers start the run again."""

    exit_code = 76
    leaves_at_once = True


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known names nearest to `name`, or all known names if none is near, as the end of a sentence:
    `; did you mean "hidden_size"?` or `; known: "bert", "electra"`."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(f'"{near}"' for near in close) + "?"
    return "; known: " + ", ".join(f'"{each}"' for each in known) if known else ""


def import_extra(module: str, extra: str, where: str) -> Any:
    """Returns a `module` that comes with an `extra` of terakoya. Raises UserError, which begins with `where`, if it is
    not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f'{where}: {error}; pip install "terakoya[{extra}]"') from error
