"""Renders the report of runs as one HTML page without external resources: curves, parameters, counts, versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from typing import Any

from terakoya.log import plural, translated
from terakoya.runs.metrics import Curves
from terakoya_report.charts import Against, Line, axis_position, chart
from terakoya_report.report import RunReport, compare_parameters

FIRST = ("loss", "perplexity")
"""Metrics whose charts come first; the charts of `LAST` come last and are smaller, in this order."""
LAST = (
    "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second", "tflops", "mfu", "gpu_memory", "gpu_power",
    "gpu_temperature", "gpu_waits", "slowest_rank_excess",
)  # fmt: skip
NO_CHART = "slowest_rank"
"""A metric that is a number of a rank, not an amount."""
TITLES = {
    "tokens_per_second": "tokens a second", "samples_per_second": "samples a second", "tflops": "TFLOP/s a device",
    "mfu": "share of the devices' peak (MFU)", "gpu_memory": "most GPU memory of rank 0, GB",
    "gpu_power": "power of rank 0's GPU, W", "gpu_temperature": "temperature of rank 0's GPU, °C",
    "gpu_waits": "share of steps in which rank 0's GPU waited for its host",
    "slowest_rank_excess": "how much longer the slowest rank works",
    "grad_norm": "gradient norm", "learning_rate": "learning rate",
    "loss": "loss (nats)", "bits_per_character": "bits per character", "bits_per_byte": "bits per byte",
}  # fmt: skip
LOSSES = ("loss", "perplexity", "bits_per_character", "bits_per_byte")
"""Endings of the metrics whose charts the page can smooth and show over a logarithmic axis."""
LEGEND = (
    "dashed: validation; dotted vertical line: restart; triangle on the axis: spike, skipped step or rollback. "
    "Drag over a chart to see a part of it large; double-click to see all."
)
WORDS = {
    "point": "VALUE at PLACE",
    "smoothed": "smoothed",
    "live": "live",
    "gone": "the server is gone; this is the last state",
}
"""What the scripts of the page say."""
PHASE_COLUMNS = ("phase", "from step", "to step", "began", "what")
SHOWN_WARNINGS = 50
SHOWN_SAMPLES = 12
MARKED, MARKS = ("loss", "grad_norm"), 200
"""Charts with a mark for each anomaly, and how many marks of a run they have."""


def now() -> str:
    """Returns the time that a page shows as that of its creation."""
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")


def live_scripts() -> str:
    """Returns the script of a page that follows runs."""
    return _part("page.js") + _part("live.js")


def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def render_page(
    runs: Sequence[RunReport],
    *,
    created: str,
    against: Against = "step",
    live_every: float | None = None,
    language: str = "en",
) -> str:
    """Returns the page for `runs`; `created` is the time of its creation, as text. With `live_every` it asks its server
    for a new `render_main` so often, in seconds. Its labels are in the user's language, whose code is `language`."""
    title = f"{translated('Run report')}: {', '.join(run.label for run in runs)}"
    colours = "".join(f".run{number} {{ --colour: var(--c{number}) }}" for number in range(8))
    hidden = "".join(
        f'body:has(#run{number}:not(:checked)) [data-run="{number}"] {{ display: none }}' for number in range(len(runs))
    )
    main, scripts = render_main(runs, created=created, against=against), _part("page.js")
    data = f' data-words="{escape(json.dumps({name: translated(text) for name, text in WORDS.items()}))}"'
    head = f"<h1>{escape(title)}</h1>"
    if live_every is not None:
        head += f'<p><span id="live" class="good">{_label("live")}</span></p>'
        scripts, data = live_scripts(), f'{data} data-every="{live_every:g}"'
    return (
        f'<!doctype html>\n<html lang="{language}"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_part('page.css')}{colours}{hidden}</style></head>\n<body{data}>\n{head}\n"
        f"{_controls()}\n<main>{main}</main>\n"
        f"<script>{scripts}</script></body></html>\n"
    )


def render_main(runs: Sequence[RunReport], *, created: str, against: Against = "step") -> str:
    """Returns what stands below the page's heading, as HTML."""
    return "\n".join(
        [
            f'<p class="quiet">{_label("created")} {escape(created)}</p>',
            _legend(runs),
            _charts(runs, against),
            _samples(runs),
            _heading("Summary"),
            _facts(runs),
            _heading("Phases"),
            _records([(run, phase) for run in runs for phase in run.phases], PHASE_COLUMNS) or _nothing(),
            _records([(run, rank) for run in runs for rank in run.profile], heading="Phases of a step, milliseconds"),
            _heading("Parameters"),
            _parameters(runs),
            _heading("Last validation"),
            _validations(runs),
            _records([(run, step) for run in runs for step in run.task_scores], heading="Scores of tasks"),
            _heading("Token stores"),
            _stores(runs),
            _heading("Versions"),
            _versions(runs),
            _warnings(runs),
        ]
    )


def _controls() -> str:
    """Returns the controls of all loss curves. They are outside of what a live page replaces, and keep their state."""
    return (
        f'<p class="controls quiet"><label>{_label("smooth losses")} <input type="range" id="smoothing" min="0" '
        'max="0.99" step="0.01" value="0"></label><label><input type="checkbox" id="logarithmic"> '
        f"{_label('logarithmic axis of losses')}</label></p>"
    )


def _legend(runs: Sequence[RunReport]) -> str:
    boxes = "".join(
        f'<label class="run{number % 8}"><input type="checkbox" id="run{number}" checked><span class="dot"></span>'
        f"{escape(run.label)}</label>"
        for number, run in enumerate(runs)
    )
    return f'<p class="legend">{boxes}<span class="quiet">{_label(LEGEND)}</span></p>'


def _charts(runs: Sequence[RunReport], against: Against) -> str:
    """Returns the charts, two to four a line: first losses and perplexities, then all other metrics, then rates."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.curves.metric_names() if name != NO_CHART))
    if not metrics:
        return f"<p>{_label('No run has written a metric yet.')}</p>"
    usual = [name for name in metrics if name not in FIRST and name not in LAST]
    large = [name for name in FIRST if name in metrics] + [name for name in usual if not _equals_loss(runs, name)]
    small = [name for name in LAST if name in metrics]
    omitted = [name for name in usual if name not in large]
    note = f'<p class="quiet">{_label("Equal to loss everywhere, not shown:")} {escape(", ".join(omitted))}</p>'
    return (
        f'<div class="charts">{"".join(_chart(runs, name, against) for name in large)}</div>{note * bool(omitted)}'
        f'{_heading("Pace")}<div class="charts small">{"".join(_chart(runs, name, against) for name in small)}</div>'
    )


def _equals_loss(runs: Sequence[RunReport], name: str) -> bool:
    """Returns whether the metric `name` equals the loss everywhere, as the only loss of an objective does."""

    def values(curves: Curves, metric: str) -> list[list[Any]]:
        return [list(points) for points in curves.of_metric(metric).values()]

    return all(values(run.curves, name) == values(run.curves, "loss") for run in runs)


def _chart(runs: Sequence[RunReport], metric: str, against: Against) -> str:
    lines, restarts, anomalies = [], [], []
    dashes: dict[str, int] = {}
    for index, run in enumerate(runs):
        for name, points in run.curves.of_metric(metric).items():
            kind = name.removesuffix(metric).strip()
            curve = kind.replace("validation", translated("validation"), 1) or translated("training")
            label = f"{run.label}: {curve}" if len(runs) > 1 else curve
            dash = dashes.setdefault(kind, len(dashes)) if kind else 0
            lines.append(Line(index, label, points, bool(kind), dash - 1 if kind and "" in dashes else dash))
        if run.curves.of_metric(metric):
            axis = {"step": 0, "hours": 1}.get(against)
            if against == "step" and metric in MARKED:
                anomalies += [
                    (index, float(step), f"{translated('step')} {step:,}: {translated(text)}")
                    for step, text in run.anomalies[-MARKS:]
                ]
            restarts += [(index, float(restart[axis])) for restart in run.curves.restarts if axis is not None]
    title = translated(TITLES.get(metric, metric.replace("_", " ")))
    last_points = (points[-1] for run in runs for points in run.curves.points.values() if points)
    right = max((axis_position(point, against) for point in last_points), default=1.0)  # the same for all charts
    svg = chart(lines, restarts, anomalies=anomalies, title=title, against=against, right=right)
    kind = ' class="losses"' if metric.endswith(LOSSES) else ""
    return f"<figure{kind}><h3>{escape(title)}</h3>{svg}{_dash_legend(dashes)}</figure>"


def _dash_legend(dashes: Mapping[str, int]) -> str:
    if len(dashes) < 2:
        return ""
    names = {kind: escape(kind.removeprefix("validation").strip() or translated("all stores")) for kind in dashes}
    key = '<svg class="key" viewBox="0 0 40 8"><g class="curve check"><polyline points="0,4 40,4"/></g></svg>'
    keys = "".join(f'<span class="dash{dash % 4}">{key}{names[kind]}</span> ' for kind, dash in dashes.items())
    return f'<figcaption class="quiet">{_label("validation")}: {keys}</figcaption>'


def _facts(runs: Sequence[RunReport]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.facts))
    rows = [f"<tr><th>{_label(name)}</th>{''.join(_fact(run, name) for run in runs)}</tr>" for name in names]
    folders = "".join(f"<td><code>{escape(str(run.status.folder))}</code></td>" for run in runs)
    rows.append(f"<tr><th>{_label('folder')}</th>{folders}</tr>")
    return _table(_heads(runs), rows)


def _fact(run: RunReport, name: str) -> str:
    kind = {"failed": "bad", "killed": "bad", "finished": "good", "training": "good"}.get(run.status.state, "")
    return f'<td class="{kind if name == "state" else ""}">{_label(run.facts.get(name, ""))}</td>'


def _samples(runs: Sequence[RunReport]) -> str:
    tables = []
    for run in runs:
        if not run.samples:
            continue
        texts = list(dict.fromkeys(text for answers in run.samples.values() for text in answers))
        rows = [
            f"<tr><th>{step:,}</th>" + "".join(f"<td>{escape(answers.get(text, ''))}</td>" for text in texts) + "</tr>"
            for step, answers in _thin(run.samples).items()
        ]
        name = f"<h3>{escape(run.label)}</h3>" if len(runs) > 1 else ""
        tables.append(name + _table([translated("step"), *texts], rows))
    return _heading("Samples") + "".join(tables) if tables else ""


def _thin(samples: Mapping[int, Mapping[str, str]]) -> dict[int, Mapping[str, str]]:
    """Returns at most about `SHOWN_SAMPLES` of `samples`, evenly, with the first and the last."""
    steps = sorted(samples)
    every = max(1, -(-(len(steps) - 1) // (SHOWN_SAMPLES - 1)))
    return {step: samples[step] for at, step in enumerate(steps) if at % every == 0 or at == len(steps) - 1}


def _records(
    found: Sequence[tuple[RunReport, Mapping[str, str]]], names: Sequence[str] = (), *, heading: str = ""
) -> str:
    """Returns a row for each record, below `heading`; "" without one. The columns are `names`, or all that occur."""
    names = names or list(dict.fromkeys(name for _, record in found for name in record))
    rows = [_row([run.label, *(translated(record.get(name, "")) for name in names)]) for run, record in found]
    return (_heading(heading) if heading else "") + _table(map(translated, ["run", *names]), rows) if rows else ""


def _parameters(runs: Sequence[RunReport]) -> str:
    differ, equal = compare_parameters(runs)
    if not differ and not equal:
        return _nothing()

    def row(path: str, differs: bool) -> str:
        cells = "".join(
            f"<td><code>{escape(json.dumps(run.parameters[path], ensure_ascii=False))}</code></td>"
            if path in run.parameters
            else f'<td class="quiet">{_label("missing")}</td>'
            for run in runs
        )
        return f'<tr class="{"differs" if differs else ""}"><th><code>{escape(path)}</code></th>{cells}</tr>'

    if len(runs) == 1:
        return _table(_heads(runs), [row(path, False) for path in equal])
    first = (
        _table(_heads(runs), [row(path, True) for path in differ]) if differ else f"<p>{_label('No differences.')}</p>"
    )
    rest = _table(_heads(runs), [row(path, False) for path in equal])
    count = _label(f"{len(equal)} equal parameter{plural(len(equal))}")
    return f"{first}<details><summary>{count}</summary>{rest}</details>"


def _validations(runs: Sequence[RunReport]) -> str:
    rows = []
    for run in runs:
        for check in run.status.validations:
            values = ", ".join(
                f"{translated(name.replace('_', ' '))} {value:.4f}" for name, value in check.values.items()
            )
            rows.append(_row([run.label, check.store or translated("all stores"), f"{check.step:,}", values]))
    return _table(map(translated, ["run", "store", "step", "metrics"]), rows) if rows else _nothing()


def _stores(runs: Sequence[RunReport]) -> str:
    names = ("store", "for", "documents", "tokens", "fingerprint")
    rows = [
        _row([run.label, store["store"], *(translated(store[name]) for name in names[1:])])
        for run in runs
        for store in run.stores
    ]
    return _table(map(translated, ["run", *names]), rows) if rows else _nothing()


def _versions(runs: Sequence[RunReport]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    if not names:
        return _nothing()
    rows = []
    for name in names:
        versions = [run.versions.get(name, "") for run in runs]
        cells = "".join(f"<td>{escape(version)}</td>" for version in versions)
        rows.append(f'<tr class="{"differs" if len(set(versions)) > 1 else ""}"><th>{escape(name)}</th>{cells}</tr>')
    return _table(_heads(runs), rows)


def _warnings(runs: Sequence[RunReport]) -> str:
    warnings = [(run.label, text) for run in runs for text in [*run.status.problems, *run.status.warnings]]
    if not warnings:
        return ""
    items = "".join(f"<li>{escape(label)}: {_label(text)}</li>" for label, text in warnings[:SHOWN_WARNINGS])
    rest = len(warnings) - SHOWN_WARNINGS
    more = f"<p>{_label(f'and {rest:,} more')}</p>" if rest > 0 else ""
    return f"{_heading('Warnings')}<ul>{items}</ul>{more}"


def _label(text: str) -> str:
    """Returns a text of the program in the user's language, as HTML."""
    return escape(translated(text))


def _heading(text: str) -> str:
    return f"<h2>{_label(text)}</h2>"


def _nothing() -> str:
    return f"<p>{_label('None recorded.')}</p>"


def _row(cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _heads(runs: Sequence[RunReport]) -> list[str]:
    return ["", *(run.label for run in runs)]


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
