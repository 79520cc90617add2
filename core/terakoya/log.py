"""The program's output: one logger, `terakoya`, and two consoles."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.segment import Segment
    from rich.table import Table

_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"  # Amazon Web Services
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{20,}"  # GitHub, GitLab
    r"|sk-[A-Za-z0-9_-]{20,}"  # OpenAI and others
    r"|AIza[\w-]{35}"  # Google
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/-]+"
    r"|(?<=/api/webhooks/)\d+/[\w-]+"  # Discord
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?)"  # JSON Web Tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*"
    r"|(?i:(?<=bearer )|(?<=basic ))(?=\S*(?:[\d=]|[a-z][A-Z]))[\w.~+/=-]{16,}"
    # the user and password of an address, after two slashes, or the one that pathlib leaves
    r"|(?<=:/)/{0,2}[^/@\s\"]*:(?!\d+(?:/|$))[^@\s\"]*(?=@)|(?:(?<=http:/)|(?<=https:/))/{0,2}[^/@\s\"]+(?=@)"
    r"|(?<=[?&])(?i:X-Amz-\w+|X-Goog-\w+|sig|signature|\w*token|(?:api_?|access_?)?key|password|secret)=[^&\s]+"
)


def hide_secrets(text: str) -> str:
    """Returns `text` with `***` for what looks like a token, and for user and password, or a signature, of an
    address."""
    return _SECRET.sub(lambda match: "/" * (len(match[0]) - len(match[0].lstrip("/"))) + "***", text)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""The last two ranges turn the order of what follows them, also beyond the text that they are in."""


def visible(text: str) -> str:
    """Returns `text` with its control characters, except tabs and line ends, as JSON writes them: `\\u001b`. What a
    file or a name contains thus cannot move the cursor, change the title, hide lines or turn their order."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def plural(count: float) -> str:
    """Returns the ending of a regular noun behind `count`: `f"{count:,} step{plural(count)}"`."""
    return "" if count == 1 else "s"


_translate: Callable[[str], str] = str
_wrap: Callable[[str, int], Iterator[str]] | None = None


def translate_with(
    function: Callable[[str], str] | None, wrap: Callable[[str, int], Iterator[str]] | None = None
) -> None:
    """Shows all texts from now on as `function` returns them, in lines of a width that `wrap` breaks them into; None:
    as they are. The command line calls this where a user has chosen a language."""
    global _translate, _wrap
    _translate, _wrap = function or str, wrap


def lines_of(text: str, width: int) -> list[str]:
    """Returns one paragraph in lines of at most `width` columns, in the way of the user's language."""
    if _wrap is None or text.isascii():
        return textwrap.wrap(text, width, break_on_hyphens=False)
    return list(_wrap(text, width))


_COMMAND = re.compile(r"\s*(\S+: )?terakoya ")


def _in_lines(text: str, width: int) -> str:
    """Returns `text` in lines of at most `width` columns, broken between words. A line that is a command to copy
    (`next: terakoya ...`) stays one line, and so does JSON."""
    if _wrap is None or text.startswith(("{", "[")):
        return text
    lines = text.split("\n")
    return "\n".join(
        part for line in lines for part in ([line] if _COMMAND.match(line) else [*_wrap(line, width)] or [""])
    )


def translated(text: str) -> str:
    """Returns a finished text of the program in the user's language. Consoles do this with the strings and the titles
    of tables that they print; other code does it where it measures a text, or puts it next to others. What a model, a
    file or a user has written is printed as rich's `Text`, which stays as it is."""
    return _translate(text)


@cache
def _console_class() -> type[Console]:
    from rich.console import Console

    class SafeConsole(Console):
        """Shows the control characters of what it prints; only rich itself sends a terminal any. Prints strings and the
        titles of tables in the user's language. `soft_wrap` keeps a string in one line in a pipe or a file; in a
        terminal it is broken between words."""

        def print(self, *objects: Any, **options: Any) -> None:
            for each in objects:
                _translate_titles(each)
            shown = [translated(each) if isinstance(each, str) else each for each in objects]
            if self.is_terminal or not options.get("soft_wrap"):
                shown = [_in_lines(each, self.width) if isinstance(each, str) else each for each in shown]
            super().print(*shown, **options)

        def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    return SafeConsole


def _translate_titles(printed: Any) -> None:
    """Translates the title and the heads of the columns if `printed` is a table."""
    from rich.table import Table

    if isinstance(printed, Table):
        printed.title = translated(printed.title) if isinstance(printed.title, str) else printed.title
        for column in printed.columns:
            column.header = translated(column.header) if isinstance(column.header, str) else column.header


def new_console(**options: Any) -> Console:
    """Returns a console with the `options` of rich's. All that terakoya prints goes through one of these."""
    return _console_class()(highlight=False, **options)


@cache
def console() -> Console:
    """Returns the console for results, on standard output: tables and answers. In a pipe or a file, lines are not
    wrapped, and tables have no spaces after their text."""
    from rich.table import Table

    class PlainConsole(_console_class()):  # type: ignore[misc]
        def print(self, *objects: Any, **options: Any) -> None:
            for each in objects:
                _translate_titles(each)
            super().print(*(TrimmedTable(each) if isinstance(each, Table) else each for each in objects), **options)

    return new_console() if sys.stdout.isatty() else PlainConsole(highlight=False, width=1000)


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
    return new_console(stderr=True)


class StatusLine:
    """The last line of the terminal while a run trains. What is printed above it goes through `hidden`."""

    def __init__(self) -> None:
        self._text = ""
        self._lock = threading.RLock()

    def show(self, text: str) -> None:
        """Shows `text` in place of what was there; "" removes it. The text must be shorter than the terminal is wide.
        Raises OSError if the terminal was closed."""
        with self._lock:
            if text or self._text:
                self._text = text
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()

    @contextmanager
    def hide(self) -> Iterator[None]:
        """Takes the line away while the block prints."""
        with self._lock:
            text = self._text
            self.show("")
            yield
            self.show(text)


status_line = StatusLine()
"""The status line of this process; empty where nothing shows one."""


def announce(text: str) -> None:
    """Says at once, before anything slow is imported, what a command begins with; once where there are several
    processes."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        with suppress(OSError):
            sys.stderr.write(f"{visible(translated(text))}\n")
            sys.stderr.flush()


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on the error console while the block runs; where that is not a terminal, a line of text
    every `HEARTBEAT_SECONDS`. Yields the function `update(bytes_done, bytes_total)`."""
    name = translated(name)
    console = error_console()
    if not console.is_terminal:
        yield _Heartbeat(name)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(line, completed=done, total=total)


HEARTBEAT_SECONDS = 10.0
"""The time between two lines about a progress in a log file."""


class _Heartbeat:
    """Prints the progress as lines, for log files."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = self.printed = time.monotonic()
        self.first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Prints a line if it is time for one: `done` of `total` bytes. The time left is by the rate since the first
        call: what came before, such as a cleaning or the parts of an earlier run, went at another."""
        now = time.monotonic()
        began, before = self.first = self.first or (now, done)
        if now - self.printed < HEARTBEAT_SECONDS:
            return
        self.printed = now
        left = ""
        if before < done < total:
            left = f", about {format_duration((now - began) * (total - done) / (done - before))} left"
        share = f" ({done / total:.0%})" if total else ""
        amounts = f"{_size(done)} / {_size(total)}" if total else _size(done)
        with suppress(OSError):
            text = f"{self.name}: {amounts}{share} done after {format_duration(now - self.start)}{left}"
            error_console().print(text, markup=False, soft_wrap=True)


def _size(size: int) -> str:
    if size < 1e7:
        return f"{size / 1e3:,.0f} KB"
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def format_duration(seconds: float) -> str:
    """Formats a duration for people: 42 s, 12 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


def print_labelled(label: str, text: str, *, style: str) -> None:
    """Prints `text` on the error console, without secrets, behind a `label` in the given style; "" is no label."""
    from rich.text import Text

    console = error_console()
    label = f"{translated(label.removesuffix(':'))}: " if label else ""
    shown = label + translated(hide_secrets(text))
    if console.is_terminal:
        shown = _in_lines(shown, console.width)
    console.print(Text(label, style=style) + Text(shown[len(label) :]), soft_wrap=True)


class ConsoleHandler(logging.Handler):
    """Prints records on the error console, above a progress bar if there is one; prefixes warnings and errors."""

    def emit(self, record: logging.LogRecord) -> None:
        style = STYLES.get(record.levelname, "")
        label = f"{record.levelname.lower()}:" if style else ""
        with suppress(OSError), status_line.hide():  # an OSError: the terminal was closed
            print_labelled(label, self.format(record), style=style)


def configure() -> None:
    """Prints the messages of the logger `terakoya` on standard error, and on both streams escapes in the place of
    characters that the terminal's encoding does not have. The command line calls this; importing terakoya as a library
    does not."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # standard error does so anyway
        sys.stdout.reconfigure(errors="backslashreplace")
    logger = logging.getLogger("terakoya")
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
    logger.setLevel(logging.INFO)
