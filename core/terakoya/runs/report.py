"""Reads the files of runs into one object a run, for `terakoya report` to show side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.folder_kinds import distinct_names
from terakoya.json_settings import leaves
from terakoya.runs import files as run_files
from terakoya.runs import metrics
from terakoya.runs import status as run_status
from terakoya.runs.metrics import Curves
from terakoya.runs.status import RunStatus, format_duration


@dataclass(frozen=True)
class RunReport:
    """One run.

    Attributes:
        label: the run's unique name in the report.
        anomalies: step and description of each spike and each step that was not finite.
        parameters: the settings by key path, as JSON values.
        facts: the run's progress, devices and rates by name, formatted.
        stores: the token stores: path, purpose, documents, tokens, fingerprint, formatted.
        versions: the versions of the programs that it ran with, by name.
    """

    label: str
    status: RunStatus
    curves: Curves
    anomalies: Sequence[tuple[int, str]]
    parameters: Mapping[str, Any]
    facts: Mapping[str, str]
    stores: Sequence[Mapping[str, str]]
    versions: Mapping[str, str]


def read_reports(
    folders: Sequence[Path], labels: Sequence[str] | None = None, *, now: float | None = None
) -> list[RunReport]:
    """Reads the runs in `folders`, labelled with `labels` or with the folders' names; equal names are extended by the
    folders above them.

    Raises:
        UserError: a folder is not a run's folder, or the number of labels differs from the number of runs.
    """
    if labels and len(labels) != len(folders):
        raise UserError(f"--label: expected {len(folders)} names, one for each run, got {len(labels)}")
    names = list(labels or distinct_names(folders))
    now = time.time() if now is None else now
    return [_read(folder, name, now) for folder, name in zip(folders, names, strict=True)]


def compare_parameters(runs: Sequence[RunReport]) -> tuple[list[str], list[str]]:
    """Returns the key paths of the parameters that differ between the runs, and of those that are equal in all, in the
    files' order."""
    absent = object()
    paths = list(dict.fromkeys(path for run in runs for path in run.parameters))
    differ = [path for path in paths if any(run.parameters.get(path, absent) != runs[0].parameters.get(path, absent)
              for run in runs)]  # fmt: skip
    return differ, [path for path in paths if path not in set(differ)]


def _read(folder: Path, label: str, now: float) -> RunReport:
    status = run_status.read(folder, now=now)
    written = metrics.read(folder)
    saved = run_files.find_checkpoints(folder)
    manifest = run_files.read_manifest(saved[-1]) if saved else {}
    starts = written.of_kind("start")
    start = {**manifest, **(starts[-1] if starts else {})}
    settings = run_files.read_parameters(folder) or manifest.get("parameters", {})
    return RunReport(
        label=label,
        status=status,
        curves=metrics.curves(written),
        anomalies=[
            (int(record.get("step") or 0), f"{kind}: {record.get('text')}")
            for kind in ("skipped", "spike")
            for record in metrics.anomalies(written, kind)
            if record.get("reason") != "overflow"  # usual in fp16
        ],
        parameters=dict(leaves(settings)),
        facts=_facts(status, written, start),
        stores=_stores(settings, start.get("stores", {})),
        versions={str(name): str(version) for name, version in start.get("versions", {}).items()},
    )


def _facts(status: RunStatus, written: metrics.Metrics, start: Mapping[str, Any]) -> dict[str, str]:
    steps = metrics.kept_steps(written)
    world = start.get("world", {})
    devices = start.get("devices") or {world.get("device", "unknown"): world.get("processes", 1)}
    hours = metrics.curves(written, ["loss"]).points.get("loss", [])
    checkpoint = status.checkpoint
    facts = {
        "state": status.told,
        "steps": f"{status.step:,}" + (f" of {status.max_steps:,}" if status.max_steps else ""),
        "tokens": f"{status.tokens:,}" + (f" of {status.max_tokens:,}" if status.max_tokens else ""),
        "rows a step": _number(start.get("global_rows"), "{:,}"),
        "hours of training": f"{hours[-1].hours:.2f}" if hours else "unknown",
        "parameters": _number(start.get("parameter_count"), "{:,}"),
        "processes": ", ".join(f"{count} x {name}" for name, count in devices.items()),
        "engine": str(world.get("engine", "unknown")),
        "tokens/s, median": _median(steps, "tokens_per_second", "{:,.0f}"),
        "samples/s, median": _median(steps, "samples_per_second", "{:,.1f}"),
        "TFLOP/s a device, median": _median(steps, "tflops", "{:,.3g}"),
        "MFU, median": _median(steps, "mfu", "{:.1%}"),
        "GFLOP a token": _number(start.get("flops_per_token"), "{:,.3g}", 1e-9),
        "restarts": str(status.restarts),
        "skipped steps": str(status.skipped_steps or ""),
        "spikes": str(status.spikes or ""),
        "last checkpoint": "none"
        if checkpoint is None
        else f"{checkpoint.name}, {format_duration(checkpoint.age)} ago",
    }
    return {name: value for name, value in facts.items() if value}


def _stores(settings: Mapping[str, Any], fingerprints: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the stores that the run trained and validated on, with counts if the stores still exist."""
    data = settings.get("data", {})
    used = [(each.get("store", ""), f"training, weight {each.get('weight', 1):g}") if isinstance(each, dict)
            else (str(each), "training") for each in data.get("train", ())]  # fmt: skip
    used += [(str(each), "validation") for each in data.get("validation", ())]
    return [{"store": path, "for": purpose, **_counts(Path(path), fingerprints.get(path))} for path, purpose in used]


def _counts(folder: Path, fingerprint: str | None) -> dict[str, str]:
    from terakoya.store.token_store import read_facts

    short = (fingerprint or "")[:12]
    try:
        facts = read_facts(folder)
    except (UserError, OSError):
        return {"documents": "missing", "tokens": "", "fingerprint": short}
    changed = f"{short}; now {facts.fingerprint[:12]}" if fingerprint and facts.fingerprint != fingerprint else None
    return {
        "documents": f"{facts.documents:,}",
        "tokens": f"{facts.tokens:,}",
        "fingerprint": changed or facts.fingerprint[:12],
    }


def _median(steps: Sequence[Mapping[str, Any]], name: str, form: str) -> str:
    values = [step[name] for step in steps if isinstance(step.get(name), int | float)]
    return form.format(statistics.median(values)) if values else ""


def _number(value: Any, form: str, factor: float | int = 1) -> str:
    return form.format(value * factor) if isinstance(value, int | float) else ""
