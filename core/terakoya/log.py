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


STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


class ConsoleHandler(logging.Handler):
    """Prints records on the error console, above a progress bar if there is one; warnings and errors say so."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record."""
        from rich.text import Text

        style = STYLES.get(record.levelname)
        level = Text(f"{record.levelname.lower()}: ", style=style) if style else Text()
        error_console().print(level + Text(self.format(record)), soft_wrap=True)


def configure(level: int = logging.INFO) -> None:
    """Shows the logger `terakoya` on standard error. The command line calls this; a library leaves it to its user."""
    logger = logging.getLogger("terakoya")
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
    logger.setLevel(level)
