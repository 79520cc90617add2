"""Renders the report of runs as one HTML page without external resources: curves, parameters, counts, versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from terakoya.log import plural
from terakoya.runs import live
from terakoya.runs.charts import Against, Line, axis_position, chart
from terakoya.runs.metrics import Curves
from terakoya.runs.report import RunReport, compare_parameters
from terakoya.runs.report_script import SCRIPT

FIRST = ("loss", "perplexity")
"""Metrics whose charts come first; the charts of `LAST` come last and are smaller, in this order."""
LAST = (
    "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second", "tflops", "mfu", "gpu_memory", "gpu_power",
    "gpu_temperature",
)  # fmt: skip
TITLES = {
    "tokens_per_second": "tokens a second", "samples_per_second": "samples a second", "tflops": "TFLOP/s a device",
    "mfu": "share of the devices' peak (MFU)", "gpu_memory": "most GPU memory of rank 0, GB",
    "gpu_power": "power of rank 0's GPU, W", "gpu_temperature": "temperature of rank 0's GPU, °C",
    "grad_norm": "gradient norm", "learning_rate": "learning rate",
    "loss": "loss (nats)",
}  # fmt: skip
LOSSES = ("loss", "perplexity")
"""Endings of the metrics whose charts the page can smooth and show over a logarithmic axis."""
SHOWN_WARNINGS = 50
SHOWN_SAMPLES = 12
MARKED, MARKS = ("loss", "grad_norm"), 200
"""Charts with a mark for each anomaly, and how many marks of a run they have."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2022; --quiet: #5f6b6d; --paper: #fff; --rule: #dfe3e4; --mark: #fff3cf;
  --bad: #b3261e; --good: #1d7a3e;
  --c0: #4363d8; --c1: #d26a00; --c2: #2e8b57; --c3: #b8336a; --c4: #7a5195; --c5: #5f6b6d; --c6: #0086a8;
  --c7: #8a6d00 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ea; --quiet: #9aa5a8; --paper: #15191b; --rule: #323a3d;
  --mark: #4a3d12; --bad: #ff8a80; --good: #6fd08c;
  --c0: #8aa2ff; --c1: #ffa24d; --c2: #63cf96; --c3: #f077a8; --c4: #c39be0; --c5: #aab6b9; --c6: #4cc6e6;
  --c7: #d9bb4a }}
body { font: 15px/1.6 system-ui, "Hiragino Sans", "Noto Sans JP", sans-serif; margin: 2rem auto; max-width: 84rem;
  padding: 0 1rem; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem } h3 { font-size: 1rem; margin: 0 0 .2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
th, td { padding: .2rem 1.2rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere }
th { font-weight: 600 } tbody th { font-weight: 400; color: var(--quiet); white-space: nowrap }
thead th { border-bottom: 2px solid var(--rule) } tbody td, tbody th { border-bottom: 1px solid var(--rule) }
tr.differs td { background: var(--mark) } .quiet, svg .quiet { color: var(--quiet); fill: var(--quiet) }
.bad { color: var(--bad) } .good { color: var(--good) } code { font-size: .92em }
.legend { position: sticky; top: 0; background: var(--paper); padding: .4rem 0; z-index: 1 }
.legend label { margin-right: 1.4rem; white-space: nowrap }
.dot { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin: 0 .4rem 0 .2rem;
  vertical-align: -1px; background: var(--colour) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 1.4rem 2rem }
.charts.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0 } svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--quiet) } svg .grid { stroke: var(--rule) }
svg .axis { stroke: var(--quiet) } .curve polyline { fill: none; stroke: var(--colour); stroke-width: 1.3 }
.curve circle { fill: var(--colour) } .curve.check polyline { stroke-width: 2 } .measured { opacity: .3 }
.controls label { margin-right: 1.4rem } .controls input { vertical-align: middle }
.dash0 polyline { stroke-dasharray: 6 3 }
.dash1 polyline { stroke-dasharray: 2 3 } .dash2 polyline { stroke-dasharray: 9 3 2 3 }
.dash3 polyline { stroke-dasharray: 1 2 }
.anomaly { fill: var(--colour) }
svg.key { display: inline-block; width: 2.6rem; height: .5rem; margin: 0 .3rem 0 .6rem; vertical-align: 2px;
  --colour: var(--quiet) }
.restart { stroke: var(--colour); stroke-dasharray: 2 4; stroke-width: 1.2 }
.pointer line { stroke: var(--quiet) } .pointer rect { fill: var(--paper); stroke: var(--rule) }
.pointer text { fill: var(--ink) } .pointer rect.chosen { fill: var(--quiet); fill-opacity: .2; stroke: none }
svg.chart { touch-action: pan-y; user-select: none; cursor: crosshair } summary { cursor: pointer; margin: .6rem 0 }
"""


def live_scripts() -> str:
    """Returns the script of a page that follows runs."""
    return SCRIPT + live.SCRIPT


def render_page(
    runs: Sequence[RunReport], *, created: str, against: Against = "step", live_every: float | None = None
) -> str:
    """Returns the page for `runs`; `created` is the time of its creation, as text. With `live_every` it asks its server
    for a new `render_main` so often, in seconds."""
    title = f"Run report: {', '.join(run.label for run in runs)}"
    colours = "".join(f".run{number} {{ --colour: var(--c{number}) }}" for number in range(8))
    hidden = "".join(
        f'body:has(#run{number}:not(:checked)) [data-run="{number}"] {{ display: none }}' for number in range(len(runs))
    )
    main, scripts, data = render_main(runs, created=created, against=against), SCRIPT, ""
    head = f"<h1>{escape(title)}</h1>"
    if live_every is not None:
        head += '<p><span id="live" class="good">live</span></p>'
        scripts, data = live_scripts(), f' data-every="{live_every:g}"'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE}{colours}{hidden}</style></head>\n<body{data}>\n{head}\n"
        f"{_controls()}\n<main>{main}</main>\n"
        f"<script>{scripts}</script></body></html>\n"
    )


def render_main(runs: Sequence[RunReport], *, created: str, against: Against = "step") -> str:
    """Returns what stands below the page's heading, as HTML."""
    return "\n".join(
        [
            f'<p class="quiet">Created {escape(created)}.</p>',
            _legend(runs),
            _charts(runs, against),
            _samples(runs),
            "<h2>Summary</h2>",
            _facts(runs),
            "<h2>Phases</h2>",
            _phases(runs),
            _profiles(runs),
            "<h2>Parameters</h2>",
            _parameters(runs),
            "<h2>Last validation</h2>",
            _validations(runs),
            "<h2>Token stores</h2>",
            _stores(runs),
            "<h2>Versions</h2>",
            _versions(runs),
            _warnings(runs),
        ]
    )


def _controls() -> str:
    """Returns the controls of all loss curves. They are outside of what a live page replaces, and keep their state."""
    return (
        '<p class="controls quiet"><label>smooth losses <input type="range" id="smoothing" min="0" max="0.99" '
        'step="0.01" value="0"></label><label><input type="checkbox" id="logarithmic"> logarithmic axis of losses'
        "</label></p>"
    )


def _legend(runs: Sequence[RunReport]) -> str:
    boxes = "".join(
        f'<label class="run{number % 8}"><input type="checkbox" id="run{number}" checked><span class="dot"></span>'
        f"{escape(run.label)}</label>"
        for number, run in enumerate(runs)
    )
    return (
        f'<p class="legend">{boxes}<span class="quiet">dashed: validation; dotted vertical line: restart; '
        "triangle on the axis: spike, skipped step or rollback. Drag over a chart to see a part of it large; "
        "double-click to see all.</span></p>"
    )


def _charts(runs: Sequence[RunReport], against: Against) -> str:
    """Returns the charts, two to four a line: first losses and perplexities, then all other metrics, then rates."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.curves.metric_names()))
    if not metrics:
        return "<p>No run has written a metric yet.</p>"
    usual = [name for name in metrics if name not in FIRST and name not in LAST]
    large = [name for name in FIRST if name in metrics] + [name for name in usual if not _equals_loss(runs, name)]
    small = [name for name in LAST if name in metrics]
    omitted = [name for name in usual if name not in large]
    note = f'<p class="quiet">Equal to loss everywhere, not shown: {escape(", ".join(omitted))}.</p>'
    return (
        f'<div class="charts">{"".join(_chart(runs, name, against) for name in large)}</div>{note * bool(omitted)}'
        f'<h2>Pace</h2><div class="charts small">{"".join(_chart(runs, name, against) for name in small)}</div>'
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
            label = f"{run.label}: {kind or 'training'}" if len(runs) > 1 else kind or "training"
            dash = dashes.setdefault(kind, len(dashes)) if kind else 0
            lines.append(Line(index, label, points, bool(kind), dash - 1 if kind and "" in dashes else dash))
        if run.curves.of_metric(metric):
            axis = {"step": 0, "hours": 1}.get(against)
            if against == "step" and metric in MARKED:
                anomalies += [(index, float(step), f"step {step:,}: {text}") for step, text in run.anomalies[-MARKS:]]
            restarts += [(index, float(restart[axis])) for restart in run.curves.restarts if axis is not None]
    title = TITLES.get(metric, metric.replace("_", " "))
    last_points = (points[-1] for run in runs for points in run.curves.points.values() if points)
    right = max((axis_position(point, against) for point in last_points), default=1.0)  # the same for all charts
    svg = chart(lines, restarts, anomalies=anomalies, title=title, against=against, right=right)
    kind = ' class="losses"' if metric.endswith(LOSSES) else ""
    return f"<figure{kind}><h3>{escape(title)}</h3>{svg}{_dash_legend(dashes)}</figure>"


def _dash_legend(dashes: Mapping[str, int]) -> str:
    """Returns which dashes belong to which validation, where a chart has several."""
    if len(dashes) < 2:
        return ""
    names = {kind: escape(kind.removeprefix("validation").strip() or "all stores") for kind in dashes}
    key = '<svg class="key" viewBox="0 0 40 8"><g class="curve check"><polyline points="0,4 40,4"/></g></svg>'
    keys = "".join(f'<span class="dash{dash % 4}">{key}{names[kind]}</span> ' for kind, dash in dashes.items())
    return f'<figcaption class="quiet">validation: {keys}</figcaption>'


def _facts(runs: Sequence[RunReport]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.facts))
    rows = []
    for name in names:
        cells = "".join(_fact(run, name) for run in runs)
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    folders = "".join(f"<td><code>{escape(str(run.status.folder))}</code></td>" for run in runs)
    rows.append(f"<tr><th>folder</th>{folders}</tr>")
    return _table(_heads(runs), rows)


def _fact(run: RunReport, name: str) -> str:
    kind = {"failed": "bad", "killed": "bad", "finished": "good", "training": "good"}.get(run.status.state, "")
    return f'<td class="{kind if name == "state" else ""}">{escape(run.facts.get(name, ""))}</td>'


def _samples(runs: Sequence[RunReport]) -> str:
    """Returns a table for each run that was sampled: one row a step, one column a text."""
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
        tables.append(name + _table(["step", *texts], rows))
    return "<h2>Samples</h2>" + "".join(tables) if tables else ""


def _thin(samples: Mapping[int, Mapping[str, str]]) -> dict[int, Mapping[str, str]]:
    """Returns at most about `SHOWN_SAMPLES` of `samples`, evenly, with the first and the last."""
    steps = sorted(samples)
    every = max(1, -(-(len(steps) - 1) // (SHOWN_SAMPLES - 1)))
    return {step: samples[step] for at, step in enumerate(steps) if at % every == 0 or at == len(steps) - 1}


def _phases(runs: Sequence[RunReport]) -> str:
    names = ("phase", "from step", "to step", "began", "what")
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in [run.label, *(phase[name] for name in names)]) + "</tr>"
        for run in runs
        for phase in run.phases
    ]
    return _table(["run", *names], rows) if rows else "<p>None recorded.</p>"


def _profiles(runs: Sequence[RunReport]) -> str:
    """The phases of a step, in milliseconds, where a run has profiled some steps."""
    names = list(dict.fromkeys(name for run in runs for rank in run.profile for name in rank))
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in [run.label, *(rank.get(name, "") for name in names)])
        + "</tr>"
        for run in runs
        for rank in run.profile
    ]  # fmt: skip
    return f"<h2>Phases of a step, milliseconds</h2>{_table(['run', *names], rows)}" if rows else ""


def _parameters(runs: Sequence[RunReport]) -> str:
    differ, equal = compare_parameters(runs)
    if not differ and not equal:
        return "<p>None recorded.</p>"

    def row(path: str, differs: bool) -> str:
        cells = "".join(
            f"<td><code>{escape(json.dumps(run.parameters[path], ensure_ascii=False))}</code></td>"
            if path in run.parameters
            else '<td class="quiet">missing</td>'
            for run in runs
        )
        return f'<tr class="{"differs" if differs else ""}"><th><code>{escape(path)}</code></th>{cells}</tr>'

    if len(runs) == 1:
        return _table(_heads(runs), [row(path, False) for path in equal])
    first = _table(_heads(runs), [row(path, True) for path in differ]) if differ else "<p>No differences.</p>"
    rest = _table(_heads(runs), [row(path, False) for path in equal])
    return f"{first}<details><summary>{len(equal)} equal parameter{plural(len(equal))}</summary>{rest}</details>"


def _validations(runs: Sequence[RunReport]) -> str:
    rows = []
    for run in runs:
        for check in run.status.validations:
            values = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in check.values.items())
            cells = [run.label, check.store or "all", f"{check.step:,}", values]
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return _table(["run", "store", "step", "metrics"], rows) if rows else "<p>None yet.</p>"


def _stores(runs: Sequence[RunReport]) -> str:
    names = ("store", "for", "documents", "tokens", "fingerprint")
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in [run.label, *(store[name] for name in names)]) + "</tr>"
        for run in runs
        for store in run.stores
    ]
    return _table(["run", *names], rows) if rows else "<p>None recorded.</p>"


def _versions(runs: Sequence[RunReport]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    if not names:
        return "<p>None recorded.</p>"
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
    items = "".join(f"<li>{escape(label)}: {escape(text)}</li>" for label, text in warnings[:SHOWN_WARNINGS])
    more = f"<p>and {len(warnings) - SHOWN_WARNINGS:,} more</p>" if len(warnings) > SHOWN_WARNINGS else ""
    return f"<h2>Warnings</h2><ul>{items}</ul>{more}"


def _heads(runs: Sequence[RunReport]) -> list[str]:
    return ["", *(run.label for run in runs)]


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
