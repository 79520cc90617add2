"""The help of a command: its example, whole sentences in lists of commands."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

WIDTH = 78
"""The columns that an example takes at most; a longer one goes on in the next line."""


def complete_overview(command: Any) -> None:
    """Gives the lists of commands, below `command`, whole sentences: the parser's own are cut to one line. What may be
    given several times is shown as one value: `<path>` for a list of paths, `CORPUS...` for arguments."""
    for parameter in command.params:
        if hasattr(parameter, "display_type"):  # from typer 0.29 on
            parameter.display_type = partial(_type_of_one, parameter.display_type)
        if parameter.nargs == -1:
            shown = (parameter.metavar or parameter.name.upper()).removesuffix("...") + "..."
            parameter.metavar = shown
            pieces = [shown if parameter.required else f"[{shown}]"]
            parameter.get_usage_pieces = lambda ctx, pieces=pieces: pieces
    for each in getattr(command, "commands", {}).values():
        each.short_help = " ".join((each.help or "").split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")
        complete_overview(each)


def _type_of_one(display_type: Callable[[Any], str | None], ctx: Any) -> str | None:
    shown = display_type(ctx)
    return shown and re.sub(r"list\[(.*)\]", r"\1", shown).replace("<Path>", "<path>")


def example_text(example: str) -> str:
    """Returns the end of the help of a command whose example is `example`."""
    lines = textwrap.wrap(example, WIDTH - len("    ") - len(" \\"), break_on_hyphens=False, break_long_words=False)
    # \b keeps the lines as they are: a shell takes them with their backslashes
    return "\b\nExample:\n  " + " \\\n    ".join(lines)
