"""The section of a card about the training of a model: how much, on what, with which programs and how much energy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from terakoya.log import plural
from terakoya.runs import metrics
from terakoya.runs.metrics import Metrics


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
    """Returns the rows of the table about devices and hours, as far as the metrics tell them."""
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
