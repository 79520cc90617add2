"""The program's output: one logger, `terakoya`, and two consoles."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


@cache
def console() -> Console:
    """Returns the console for results, on standard output: tables and answers. In a pipe or a file, lines are not
    wrapped, and tables have no spaces after their text."""
    from rich.console import Console
    from rich.table import Table

    class PlainConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(TrimmedTable(each) if isinstance(each, Table) else each for each in objects), **options)

    return Console(highlight=False) if sys.stdout.isatty() else PlainConsole(highlight=False, width=1000)


class TrimmedTable:
    """A table without the spaces that fill up its last column."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table's lines, each up to its last character that is not a space."""
        from rich.segment import Segment

        for line in console.render_lines(self._table, options, pad=False):
            while line and not line[-1].text.rstrip():
                line.pop()
            if line:
                text, style, control = line.pop()
                line.append(Segment(text.rstrip(), style, control))
            yield from line
            yield Segment.line()


@cache
def error_console() -> Console:
    """Returns the console for progress, warnings and errors, on standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on the error console while the block runs; shows nothing if that is not a terminal. Yields
    the function `update(bytes_done, bytes_total)`."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = error_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(line, completed=done, total=total)


STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


class ConsoleHandler(logging.Handler):
    """Prints records on the error console, above a progress bar if there is one; prefixes warnings and errors."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record."""
        from rich.text import Text

        style = STYLES.get(record.levelname)
        level = Text(f"{record.levelname.lower()}: ", style=style) if style else Text()
        error_console().print(level + Text(self.format(record)), soft_wrap=True)


def configure(level: int = logging.INFO) -> None:
    """Prints the messages of the logger `terakoya` on standard error. The command line calls this; importing terakoya
    as a library does not."""
    logger = logging.getLogger("terakoya")
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
    logger.setLevel(level)
