"""Draws curves as SVG, readable without a script; the report's script adds the values under the pointer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from terakoya.log import translated
from terakoya.runs.metrics import Point

Against = Literal["step", "hours", "tokens"]
AXES: Mapping[Against, str] = {"step": "steps", "hours": "hours of training", "tokens": "tokens"}
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 34
"""Margins around the plot, in the units of the view box."""
LEGEND_ROW = 18
"""Height of a line of a standalone chart's legend."""
MAX_POINTS = 800
"""How many points of a curve are drawn; a longer curve is thinned, see `thin_points`."""
CUT_SHARE = 0.03
"""The share of the training points that may lie above the plot, so that the first steps do not flatten all others."""
PLOT = (
    f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
    f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>'
)
STYLE = (
    "text{font:12px sans-serif;fill:#777}.grid{stroke:#7774}.axis{stroke:#777}"
    ".curve polyline{fill:none;stroke:#3b82d0;stroke-width:1.2}"
    ".curve circle{fill:#3b82d0}.check polyline{stroke:#d0673b;stroke-width:2}.check circle{fill:#d0673b}"
    ".dash1 polyline{stroke:#2e9e6b}.dash1 circle{fill:#2e9e6b}.dash2 polyline{stroke:#9b59b6}"
    ".dash2 circle{fill:#9b59b6}.dash3 polyline{stroke:#b8860b}.dash3 circle{fill:#b8860b}"
)
"""The style sheet of a standalone chart."""


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Attributes:
        run: the index of the run.
        name: the label.
        validation: whether the values come from a validation.
        dash: which dash pattern a validation curve has.
    """

    run: int
    name: str
    points: Sequence[Point]
    validation: bool
    dash: int = 0


def chart(
    lines: Sequence[Line],
    restarts: Sequence[tuple[int, float]],
    *,
    anomalies: Sequence[tuple[int, float, str]] = (),
    title: str,
    against: Against,
    right: float,
) -> str:
    """Returns an SVG of `lines` over steps, hours or tokens up to `right`. `restarts` are the (run, position) of dotted
    vertical lines, `anomalies` the (run, position, description) of marks on the axis."""
    drawn = [(line, thin_points(line.points)) for line in lines]
    right = right or 1.0
    low, high = _bounds([(line.validation, [point.value for point in points]) for line, points in drawn])
    x = _scale(0.0, right, LEFT, WIDTH - RIGHT)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_axes(right, low, high, x, y, translated(AXES[against]))]
    parts += [
        f'<line class="restart run{run % 8}" data-run="{run}" data-x="{x(position):.1f}" '
        f'x1="{x(position):.1f}" x2="{x(position):.1f}" y1="{TOP}" '
        f'y2="{HEIGHT - BOTTOM}"><title>{escape(translated("restart"))}</title></line>'
        for run, position in restarts
    ]
    parts += [
        f'<path class="anomaly run{run % 8}" data-run="{run}" data-x="{x(position):.1f}" '
        f'd="M{x(position):.1f},{HEIGHT - BOTTOM}l-4,-8h8z">'
        f"<title>{escape(text)}</title></path>"
        for run, position, text in anomalies
    ]
    for line, points in drawn:
        parts.append(_curve(line, [(x(axis_position(point, against)), y(point.value)) for point in points]))
    shown = [
        {
            "run": line.run,
            "name": line.name,
            "x": [round(x(axis_position(point, against)), 1) for point in points],
            "y": [round(min(max(y(point.value), TOP), HEIGHT - BOTTOM), 1) for point in points],
            "at": [_short(axis_position(point, against)) for point in points],
            "value": [f"{point.value:.5g}" for point in points],
        }
        for line, points in drawn
    ]
    data = escape(json.dumps(shown, ensure_ascii=False, separators=(",", ":")), quote=True)
    inner = f'{PLOT}<g class="drawn">{"".join(parts)}</g><g class="pointer"></g>'
    return f'{_opening_tag(title)} data-lines="{data}" data-range="[{right},{low},{high}]">{inner}</svg>'


def standalone_chart(lines: Sequence[Line], *, title: str) -> str:
    """Returns an SVG file with `lines` over steps, readable on a white and on a black background."""
    right = max(axis_position(line.points[-1], "step") for line in lines)
    low, high = _bounds([(line.validation, [point.value for point in line.points]) for line in lines])
    x, y = _scale(0.0, right or 1.0, LEFT, WIDTH - RIGHT), _scale(low, high, HEIGHT - BOTTOM, TOP)
    curves = [_curve(line, [(x(point.step), y(point.value)) for point in thin_points(line.points)]) for line in lines]
    drawn = _axes(right, low, high, x, y, AXES["step"]) + "".join(curves) + _legend(lines)
    tag = _opening_tag(title, height=HEIGHT + LEGEND_ROW * len(lines))
    return f'{tag} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{PLOT}{drawn}</svg>\n'


def _legend(lines: Sequence[Line]) -> str:
    rows = []
    for number, line in enumerate(lines):
        y = HEIGHT + LEGEND_ROW * number + 8
        key = _curve(line, [(LEFT, y), (LEFT + 24, y)], clipped=False)
        rows.append(f'{key}<text x="{LEFT + 32}" y="{y + 4}">{escape(line.name)}</text>')
    return "".join(rows)


def _opening_tag(title: str, *, height: int = HEIGHT) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"'


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Returns all of `points`, or about `MAX_POINTS`: of each of equal segments the first, last, lowest and highest."""
    if len(points) <= MAX_POINTS:
        return list(points)
    segments = MAX_POINTS // 4
    kept = []
    for number in range(segments):
        segment = points[number * len(points) // segments : (number + 1) * len(points) // segments]
        chosen = {0, len(segment) - 1}
        chosen.add(min(range(len(segment)), key=lambda index: segment[index].value))
        chosen.add(max(range(len(segment)), key=lambda index: segment[index].value))
        kept += [segment[index] for index in sorted(chosen)]
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`."""
    rough = (high - low) / count
    if rough <= 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _bounds(curves: Sequence[tuple[bool, Sequence[float]]]) -> tuple[float, float]:
    """Returns the lowest and the highest value of the plot, with a margin; a few values far above the rest are cut."""
    values = sorted(value for _, curve in curves for value in curve)
    if not values:
        return 0.0, 1.0
    low, high = values[0], values[-1]
    usual = values[min(len(values) - 1, math.ceil((1 - CUT_SHARE) * len(values)))]
    if len(values) > 40 and high - usual > 0.4 * (high - low):
        high = usual
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return (low - margin if low - margin > 0 or low < 0 else 0.0), high + margin


def axis_position(point: Point, against: Against) -> float:
    """Returns the position of `point` on the axis `against`."""
    return float({"step": point.step, "hours": point.hours, "tokens": point.tokens}[against])


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _axes(
    right: float, low: float, high: float, x: Callable[[float], float], y: Callable[[float], float], name: str
) -> str:
    parts = []
    for value in ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    for value in ticks(0.0, right, 6):
        end = "end" if x(value) > WIDTH - 40 else "middle"
        parts.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{end}">{_short(value)}</text>')
    parts = [f'<g class="ticks">{"".join(parts)}</g>']
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(f'<text class="quiet" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{name}</text>')
    return "".join(parts)


def _curve(line: Line, positions: Sequence[tuple[float, float]], *, clipped: bool = True) -> str:
    kind = f"curve run{line.run % 8}" + (f" check dash{line.dash % 4}" if line.validation else "")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    drawn = f'<polyline points="{path}"/>' if len(positions) > 1 else ""
    dots = line.validation or len(positions) == 1
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in positions) if dots else ""
    title = f"<title>{escape(line.name)}</title>"
    clip = ' clip-path="url(#plot)"' if clipped else ""
    return f'<g class="{kind}" data-run="{line.run}"{clip}>{title}{drawn}{marks}</g>'


def _short(value: float) -> str:
    """Formats a number for an axis: 0.05, 1.5, 2,000, 30k, 1.2M, 3e-5."""
    size = abs(value)
    if value == 0:
        return "0"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):,.4g}{name}"
    if size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:,.4g}" if size < 1000 else f"{value:,.0f}"
