"""Where the program's words go: one logger, `terakoya`, and two consoles."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def console() -> Console:
    """The console of results: tables and answers, on standard output; in a pipe lines are as long as they need."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


@cache
def error_console() -> Console:
    """The console of everything else: progress, warnings, errors, on standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def configure(level: int = logging.INFO) -> None:
    """Shows the logger `terakoya` on standard error. The command line calls this; a library leaves it to its user."""
    from rich.logging import RichHandler

    logger = logging.getLogger("terakoya")
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        handler = RichHandler(console=error_console(), show_path=False, log_time_format="[%X]", rich_tracebacks=False)
        logger.addHandler(handler)
    logger.setLevel(level)
