"""The sections of a card about the training of a model: how much, on what, with which programs and how much energy, and
its losses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from terakoya.errors import UserError
from terakoya.log import plural
from terakoya.runs import metrics
from terakoya.runs.checkpoints import read_manifest
from terakoya.runs.idle_starts import without_idle_starts
from terakoya.runs.metrics import Metrics
from terakoya.store.token_store import read_facts
from terakoya_report.charts import Line, standalone_chart

CHART = "training.svg"
"""File name of the chart of losses, in the card's folder."""
TABLE_ROWS = 12
"""Number of rows in the table of losses."""


@dataclass(frozen=True)
class TrainingFacts:
    """How a model was trained.

    Attributes:
        manifest: the manifest of its checkpoint.
        metrics: the metrics of the run up to that checkpoint.
        cleaning: name of a store that was trained on -> the steps that cleaned its text, and what they dropped.
    """

    manifest: Mapping[str, Any]
    metrics: Metrics
    cleaning: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Path) -> TrainingFacts:
        """Reads the manifest of the folder `checkpoint` and the metrics, if any, of the run that contains it."""
        manifest = read_manifest(checkpoint)
        above = checkpoint.absolute().parents[:2]  # RUN of RUN/model-best, or of RUN/checkpoints/step-...
        run = next((folder for folder in above if (folder / metrics.FILE).is_file()), None)
        records = () if run is None else without_idle_starts(metrics.read(run)).records
        earlier = tuple(record for record in records if int(record.get("step") or 0) <= manifest["step"])
        return cls(manifest, Metrics(earlier), _read_cleaning(manifest))

    def loss_chart(self) -> str | None:
        """The loss over the steps as an SVG; None if the metrics contain no loss."""
        curves = metrics.curves(self.metrics, ["loss"]).points
        lines = [
            Line(0, _curve_label(name), points, name.startswith("validation"), max(0, number - 1))
            for number, (name, points) in enumerate(sorted(curves.items(), key=lambda curve: curve[0] != "loss"))
        ]
        return standalone_chart(lines, title="loss over optimizer steps") if lines else None


def _read_cleaning(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns `TrainingFacts.cleaning`, of the stores that are still what the run was trained on."""
    parameters = manifest["parameters"]
    data = parameters["data"]
    phases = [phase["data"] or {} for phase in parameters.get("phases") or ()]
    found = {}
    for each in [entry for stage in (data, *(data.get("stages") or ()), *phases) for entry in stage.get("train") or ()]:
        try:
            facts = read_facts(Path(each["store"]))
        except UserError:
            continue
        description = _describe_cleaning(facts.options)
        if description is not None and facts.fingerprint == manifest["stores"].get(each["store"]):
            found[PurePath(each["store"]).name] = description
    return found


def _describe_cleaning(options: Mapping[str, Any]) -> str | None:
    """Returns the cleaning steps among the options of a store, with their settings, and what they dropped, with its
    share; None where there were none, or several lists of steps, as in a merged store."""
    try:
        steps = ", ".join(map(_describe_step, json.loads(options.get("clean") or "")["steps"]))
    except ValueError:
        return None
    counts = {name: count for name, count in options.items() if name.startswith("clean: ") and isinstance(count, int)}
    total = counts.pop("clean: documents", 0)
    shares = [
        f"{count:,} {name.removeprefix('clean: ')} ({count / total:.2%})" for name, count in counts.items() if total
    ]
    return f"cleaned with {steps}" + (f": {', '.join([f'{total:,} documents', *shares])}" if total else "")


def _describe_step(step: Mapping[str, Any]) -> str:
    """Returns the name of a step and in brackets its settings that are numbers or words: no lists, and no paths of the
    machine."""
    told = {key: value for key, value in step.items() if key != "type" and isinstance(value, int | float | str)}
    settings = [f"{key} {value}" for key, value in told.items() if "/" not in str(value)]
    return f"{step['type']} ({', '.join(settings)})" if settings else str(step["type"])


def _curve_label(name: str) -> str:
    store = name.removeprefix("validation ").removesuffix("loss").strip()
    return "training" if name == "loss" else f"validation on {PurePath(store).name}" if store else "validation"


def describe(manifest: Mapping[str, Any], written: Metrics) -> str:
    """Returns the section about the training: steps, rows, tokens, hours, energy, versions, stores with their
    fingerprints.

    Args:
        manifest: that of the checkpoint.
        written: the metrics of the run up to it.
    """
    parameters = manifest["parameters"]
    world = manifest["world"]
    longest = parameters["architecture"].get("max_position_embeddings")  # without RoBERTa's positions before the first
    versions = ", ".join(f"{package} {version}" for package, version in manifest["versions"].items())
    lines = [
        "## Training",
        "",
        "| | |",
        "|---|---|",
        f"| architecture | `{parameters['architecture']['type']}` |",
        f"| parameters trained | {_trained_count(manifest)} |",
        *(f"| started from | {each} |" for each in origins(manifest)),
        f"| objective | `{parameters['objective']['type']}` |",
        f"| vocabulary | {manifest['vocabulary']['size']:,} |",
        *([f"| longest input | {longest:,} tokens |"] if longest else []),
        f"| steps | {manifest['step']:,} of {manifest['max_steps']:,} |",
        *describe_rows(manifest),
        f"| tokens | {manifest['consumed_tokens']:,} |",
        f"| processes | {world['processes']} on {world['device']}, {world['engine']}, {parameters['precision']} |",
        *_hardware(written),
        f"| versions | {versions} |",
        "",
        "| data | share of rows | fingerprint (SHA-256) |",
        "|---|---:|---|",
    ]
    shares = _shares(manifest)
    total = sum(shares.values())
    stages = [*(parameters["data"].get("stages") or ()), *(each["data"] or {} for each in parameters.get("phases", ()))]
    later = {store["store"] for stage in stages for store in stage.get("train") or ()}
    for store, fingerprint in manifest["stores"].items():
        share = "in a later stage" if store in later else "validation"
        share = f"{shares[store] / total:.2%}" if store in shares else share
        lines.append(f"| {PurePath(store).name} | {share} | `{fingerprint}` |")
    return "\n".join(lines)


def _shares(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Returns the rows that were read of each store of `data.train`, and of each store that was read; the weights
    before the first row."""
    train = manifest["parameters"]["data"]["train"]
    named = dict.fromkeys((each["store"] for each in train), 0)
    rows: Counter[str] = Counter(named)
    for position in manifest.get("positions", ()):
        rows[position["store"]] += position["rows"]
    if not rows.total():
        return {each["store"]: each["weight"] for each in train}
    return {store: count for store, count in rows.items() if count or store in named}


def describe_rows(manifest: Mapping[str, Any]) -> list[str]:
    """Returns the rows of the table about the rows of the training; with phases, those of each phase that has begun."""
    if "phases" not in manifest:
        length = manifest["parameters"]["data"]["sequence_length"]
        return [f"| rows | {manifest['consumed_rows']:,} of {length:,} tokens |"]
    lines = [f"| rows | {manifest['consumed_rows']:,} |"]
    for phase in manifest["phases"]:
        taken = min(phase["steps"], manifest["step"] - phase["first_step"])
        if taken > 0:
            name = f", {phase['name']}" if phase["name"] else ""
            rows = f"{phase['global_rows']:,} rows of {phase['sequence_length']:,} tokens a step"
            lines.append(f"| phase {phase['number']}{name} | {taken:,} step{plural(taken)}, {rows} |")
    return lines


def origins(manifest: Mapping[str, Any]) -> list[str]:
    """Returns the models whose weights the training began with: OWNER/NAME of those from the Hub, else the folder's
    name."""
    folders = [PurePath(each["folder"]) for each in (manifest.get("started_from") or {}).values()]
    cached = [next((part for part in folder.parts if part.startswith("models--")), None) for folder in folders]
    names = [
        folder.name if part is None else part.removeprefix("models--").replace("--", "/")
        for part, folder in zip(cached, folders, strict=True)
    ]
    return list(dict.fromkeys(names))


def _trained_count(manifest: Mapping[str, Any]) -> str:
    """Number of trained parameters, and of all parameters if only some were trained."""
    total, lora = manifest["parameter_count"], manifest["parameters"].get("lora")
    trained = manifest.get("trained_parameter_count", total)
    if lora is not None:
        return f"{trained:,}, as adapters of rank {lora['r']} (LoRA), merged into {total:,}"
    return f"{trained:,}" if trained == total else f"{trained:,} of {total:,}"


def _hardware(written: Metrics) -> list[str]:
    devices = [
        ", ".join(f"{count} x {name}" for name, count in start["devices"].items())
        for start in written.of_kind("start")
        if start.get("devices")
    ]
    rows = [f"| hardware | {'; then '.join(dict.fromkeys(devices))} |"] if devices else []
    points = metrics.curves(written, ["loss"]).points.get("loss")
    hours = points[-1].hours if points else 0.0
    if hours >= 0.005:
        rows += [f"| hours of training | {hours:,.2f} |", f"| energy | {_energy(written) or 'not measured'} |"]
    return rows


def _energy(written: Metrics) -> str | None:
    """Returns the energy that the GPUs used and how it was found; None where no GPU said its power, or where their
    number changed.

    A run logs the power of one GPU of its own: here it stands for all of them.
    """
    powers = metrics.curves(written, ["gpu_power"]).points.get("gpu_power", ())
    counts = {sum(start["devices"].values()) for start in written.of_kind("start") if start.get("devices")}
    if not powers or len(counts) != 1:
        return None
    before = (0.0, *(point.hours for point in powers))
    hours = powers[-1].hours
    if not hours:
        return None
    watt_hours = sum(point.value * (point.hours - begin) for point, begin in zip(powers, before, strict=False))
    number = counts.pop()
    return (
        f"{watt_hours * number / 1000:,.3g} kWh: {watt_hours / hours:,.0f} W on average, read from one GPU, times "
        f"{number} GPU{plural(number)} and {hours:,.2f} hours; without processors, memory and cooling"
    )


def describe_losses(facts: TrainingFacts) -> str:
    """A chart and a table of the losses: of training steps, and of the last validation up to each of them that no row
    before has. A validation before the first step has a row of its own."""
    steps = metrics.kept_steps(facts.metrics)
    if not steps:
        return ""
    chosen = sorted({round(index * (len(steps) - 1) / max(1, TABLE_ROWS - 1)) for index in range(TABLE_ROWS)})
    validations = [entry for entry in facts.metrics.of_kind("validation") if entry.get("store")]
    stores = list(dict.fromkeys(entry["store"] for entry in validations))
    header = ["step", "tokens", "training loss", *(f"validation on {PurePath(store).name}" for store in stores)]
    image = f"![loss of training and validation over the steps]({CHART})"
    lines = ["## Losses", "", image, "", f"| {' | '.join(header)} |", "|---:" * len(header) + "|"]
    rows = [steps[index] for index in chosen]
    if any(check["step"] == 0 for check in validations):
        rows.insert(0, {"step": 0, "tokens": 0})
    before = -1
    for entry in rows:
        losses = {check["store"]: check["loss"] for check in validations if before < check["step"] <= entry["step"]}
        before = entry["step"]
        shown = [entry.get("loss"), *(losses.get(store) for store in stores)]  # null where it was not finite
        cells = ["" if loss is None else f"{loss:.4f}" for loss in shown]
        row = [f"{entry['step']:,}", f"{entry['tokens']:,}", *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
