"""Curves drawn as SVG: readable as they stand, with values under the pointer where the page's script runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from terakoya.runs.metrics import Point

Against = Literal["step", "hours", "tokens"]
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 34
"""Of the picture around the plot, in the picture's units."""
MOST_POINTS = 800
"""Points of a curve that are drawn; of a longer one in each stretch the first, the last, the lowest and the highest."""
LOWEST_SHARE = 0.03
"""Of the points of training: the highest such share is cut off at the top, so that the first steps do not flatten all
the others."""
PLOT = (
    f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
    f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>'
)
STYLE = (
    "text{font:12px sans-serif;fill:#777}.grid{stroke:#7774}.axis{stroke:#777}"
    ".curve polyline{fill:none;stroke:#3b82d0;stroke-width:1.2}"
    ".curve.check polyline{stroke:#d0673b;stroke-width:2}.curve circle{fill:#d0673b}"
    ".dash1 polyline{stroke-dasharray:6 3}.dash2 polyline{stroke-dasharray:2 3}"
    ".dash3 polyline{stroke-dasharray:9 3 2 3}"
)
"""Of a picture that stands alone."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart: whose it is, by number, what it is called, and whether it is of a validation."""

    run: int
    name: str
    points: Sequence[Point]
    validation: bool
    dash: int = 0


def chart(
    lines: Sequence[Line],
    restarts: Sequence[tuple[int, float]],
    *,
    title: str,
    against: Against,
    right: float,
) -> str:
    """An SVG of `lines` over steps, hours or tokens up to `right`; `restarts` are (run, place) of dotted upright
    lines."""
    drawn = [(line, thinned(line.points)) for line in lines]
    right = right or 1.0
    low, high = _bounds([(line.validation, [point.value for point in points]) for line, points in drawn])
    x = _scale(0.0, right, LEFT, WIDTH - RIGHT)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_axes(right, low, high, x, y, against)]
    parts += [
        f'<line class="restart run{run % 8}" data-run="{run}" x1="{x(place):.1f}" x2="{x(place):.1f}" y1="{TOP}" '
        f'y2="{HEIGHT - BOTTOM}"><title>restart</title></line>'
        for run, place in restarts
    ]
    for line, points in drawn:
        parts.append(_curve(line, [(x(place_of(point, against)), y(point.value)) for point in points]))
    shown = [
        {
            "run": line.run,
            "name": line.name,
            "x": [round(x(place_of(point, against)), 1) for point in points],
            "y": [round(min(max(y(point.value), TOP), HEIGHT - BOTTOM), 1) for point in points],
            "at": [_short(place_of(point, against)) for point in points],
            "value": [f"{point.value:.5g}" for point in points],
        }
        for line, points in drawn
    ]
    data = escape(json.dumps(shown, ensure_ascii=False, separators=(",", ":")), quote=True)
    return f'{_opened(title)} data-lines="{data}">{PLOT}{"".join(parts)}<g class="pointer"></g></svg>'


def picture(lines: Sequence[Line], *, title: str) -> str:
    """An SVG file of its own with `lines` over steps, readable on white and on black."""
    right = max(place_of(line.points[-1], "step") for line in lines)
    low, high = _bounds([(line.validation, [point.value for point in line.points]) for line in lines])
    x, y = _scale(0.0, right or 1.0, LEFT, WIDTH - RIGHT), _scale(low, high, HEIGHT - BOTTOM, TOP)
    curves = [_curve(line, [(x(point.step), y(point.value)) for point in thinned(line.points)]) for line in lines]
    drawn = _axes(right, low, high, x, y, "step") + "".join(curves)
    return f'{_opened(title)} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{PLOT}{drawn}</svg>\n'


def _opened(title: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"'


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` of `points`: all, or in each of equal stretches the first, last, lowest and highest."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, most // 4)
    kept = []
    for number in range(stretches):
        part = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        chosen = {0, len(part) - 1}
        chosen.add(min(range(len(part)), key=lambda at: part[at].value))
        chosen.add(max(range(len(part)), key=lambda at: part[at].value))
        kept += [part[at] for at in sorted(chosen)]
    return kept


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    rough = (high - low) / about
    if rough <= 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _bounds(curves: Sequence[tuple[bool, Sequence[float]]]) -> tuple[float, float]:
    """What is drawn from bottom to top, with a margin: all values but the highest few of training curves that are far
    above the rest."""
    values = sorted(value for _, each in curves for value in each)
    if not values:
        return 0.0, 1.0
    low, high = values[0], values[-1]
    usual = values[min(len(values) - 1, math.ceil((1 - LOWEST_SHARE) * len(values)))]
    if len(values) > 40 and high - usual > 0.4 * (high - low):
        high = usual
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return (low - margin if low - margin > 0 or low < 0 else 0.0), high + margin


def place_of(point: Point, against: Against) -> float:
    """Where `point` stands on the axis `against`."""
    return float({"step": point.step, "hours": point.hours, "tokens": point.tokens}[against])


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _axes(
    right: float,
    low: float,
    high: float,
    x: Callable[[float], float],
    y: Callable[[float], float],
    against: Against,
) -> str:
    parts = []
    for value in ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    for value in ticks(0.0, right, 6):
        end = "end" if x(value) > WIDTH - 40 else "middle"
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{end}">{_short(value)}</text>')
    name = {"step": "steps", "hours": "hours of training", "tokens": "tokens"}[against]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(f'<text class="quiet" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{name}</text>')
    return "".join(parts)


def _curve(line: Line, places: Sequence[tuple[float, float]]) -> str:
    kind = f"curve run{line.run % 8}" + (f" check dash{line.dash % 4}" if line.validation else "")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline points="{path}"/>' if len(places) > 1 else ""
    dots = line.validation or len(places) == 1
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in places) if dots else ""
    title = f"<title>{escape(line.name)}</title>"
    return f'<g class="{kind}" data-run="{line.run}" clip-path="url(#plot)">{title}{drawn}{marks}</g>'


def _short(value: float) -> str:
    """A number for an axis: 0.05, 1.5, 2,000, 30k, 1.2M, 3e-5."""
    size = abs(value)
    if value == 0:
        return "0"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):,.4g}{name}"
    if size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:,.4g}" if size < 1000 else f"{value:,.0f}"
