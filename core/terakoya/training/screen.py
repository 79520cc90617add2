"""What a run shows on a terminal: a table of its logged steps, one line for each validation store, and below both the
progress. Whatever is too wide for the terminal is left out as a whole.

Functions return lines of at most `width` columns; a character of Japanese takes two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len

from terakoya.log import translated

GAP = "  "
HEADER_EVERY = 20
"""Rows between two headers, so that one is always in sight."""
SMALLEST_BAR, LARGEST_BAR = 8, 40
FIRST_DROPPED = ("mfu", "tflops", "bits/character", "gradient norm", "samples/s", "tokens/s", "learning rate")
"""The columns that a narrow terminal does without, in this order, once the named losses are gone; `step` and `loss`
always stay."""
ALWAYS = ("step", "loss")


@dataclass(frozen=True)
class StepView:
    """A logged step as a user sees it.

    Attributes:
        cells: name -> text, for a row of the table on a terminal.
        share: the share of the run that is done.
        parts: what stands next to the progress bar, the most important first.
        line: all of it in one line, for a log file.
    """

    cells: Mapping[str, str]
    share: float
    parts: tuple[str, ...]
    line: str


def columns_that_fit(cells: Mapping[str, int], width: int) -> list[str]:
    """Returns the names of `cells` (name -> columns) that fit into `width` next to each other, in their order."""
    kept = list(cells)
    named = [name for name in cells if name not in (*ALWAYS, *FIRST_DROPPED)]
    for name in (*reversed(named), *FIRST_DROPPED):
        if sum(cells[each] for each in kept) + len(GAP) * (len(kept) - 1) <= width:
            break
        if name in kept:
            kept.remove(name)
    return kept


@dataclass
class StepTable:
    """The table of the logged steps. Columns get wider with their values and never narrower.

    Attributes:
        widths: the columns of each shown name, as in the last header.
        rows: rows since the last header.
    """

    widths: dict[str, int] = field(default_factory=dict)
    rows: int = 0

    def lines(self, cells: Mapping[str, str], width: int) -> tuple[str | None, str]:
        """Returns the header, where one is due, and the row of one step: name -> text."""
        titles = {name: translated(name) for name in cells}
        needed = {
            name: max(cell_len(titles[name]), cell_len(text), self.widths.get(name, 0)) for name, text in cells.items()
        }
        shown = columns_that_fit(needed, width)
        widths = {name: needed[name] for name in shown}
        header = None
        if widths != self.widths or self.rows >= HEADER_EVERY:
            header = GAP.join(_right(titles[name], widths[name]) for name in shown)
            self.widths, self.rows = widths, 0
        self.rows += 1
        return header, GAP.join(_right(cells[name], widths[name]) for name in shown)


def step_cells(values: Mapping[str, float], *, step: str) -> dict[str, str]:
    """Returns the cells of a logged step: `step`, the loss, each named loss that differs from it, its bits for each
    character of text where they are known, rates."""
    loss = values["loss"]
    formats = {
        "learning_rate": ("learning rate", "{:.2e}"), "grad_norm": ("gradient norm", "{:.3f}"),
        "tokens_per_second": ("tokens/s", "{:,.0f}"), "tflops": ("tflops", "{:,.3g}"), "mfu": ("mfu", "{:.1%}"),
    }  # fmt: skip
    cells = {"step": step, "loss": f"{loss:.4f}"}
    for name, value in values.items():
        if name.endswith("_loss") and value != loss:
            cells[name.removesuffix("_loss").replace("_", " ")] = f"{value:.4f}"
    if (bits := bits_per_character(values)) is not None:
        cells["bits/character"] = f"{bits:.4f}"
    for name, (title, form) in formats.items():
        if name in values:
            cells[title] = form.format(values[name])
    return cells


def bits_per_character(values: Mapping[str, float]) -> float | None:
    """Returns the loss in bits for each character of text, of masked tokens in a model that fills them in; None where
    the size of the text is not known."""
    return next((value for name, value in values.items() if name.endswith("bits_per_character")), None)


def progress_bar(share: float, parts: Sequence[str], width: int) -> str:
    """Returns the progress: the share done, a bar, and as many of `parts` as fit, the first ones first."""
    percent = f"{share:4.0%}"
    shown: list[str] = []
    for part in parts:
        if cell_len(GAP.join([percent, " " * SMALLEST_BAR, *shown, part])) > width:
            break
        shown.append(part)
    room = width - cell_len(GAP.join([percent, "", *shown]))
    if room < 1:
        return GAP.join([percent, *shown])[:width]
    size = min(LARGEST_BAR, room)
    done = min(size, int(size * share))
    return GAP.join([percent, "━" * done + "─" * (size - done), *shown])


def validation_lines(step: int, stores: Mapping[str, Mapping[str, float]], width: int) -> list[str]:
    """Returns one line for each store of a validation at `step`, aligned: its name, its loss, and as many of its other
    numbers as fit; those that are equal to the loss are left out.

    A name that is too long loses folders from its front, and is never cut itself.
    """
    names = {store: _short(store, list(stores), width // 3) for store in stores}
    longest = max(map(cell_len, names.values()), default=0)
    lines = []
    for store, values in stores.items():
        line = (
            translated(f"step {step:,}  validation") + f"{GAP}{names[store]}{' ' * (longest - cell_len(names[store]))}"
        )
        first = True
        for name, value in values.items():
            if name != "loss" and value == values.get("loss"):
                continue
            number = f"{value:.4f}" if math.isfinite(value) else str(value)
            part = f"{GAP}{translated(name)} {number}"
            if not first and cell_len(line + part) > width:
                break
            line, first = line + part, False
        lines.append(line)
    return lines


def _short(store: str, stores: Sequence[str], room: int) -> str:
    """Returns `store` without the folders that all `stores` have in front, and without further ones if it does not fit
    into `room` columns and its name stays its own."""
    parts = Path(store).parts or (store,)
    endings = [str(Path(*parts[start:])) for start in range(len(parts))] or [store]
    fitting = [each for each in endings if cell_len(each) <= room] or endings[-1:]
    unique = [
        each for each in fitting if sum(other == each or other.endswith(f"/{each}") for other in stores) == 1
    ]  # fmt: skip
    return unique[-1] if unique else fitting[0]


def _right(text: str, width: int) -> str:
    return " " * (width - cell_len(text)) + text


def duration(seconds: float) -> str:
    """Returns `seconds` as H:MM:SS."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
