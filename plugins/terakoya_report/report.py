"""Reads the files of runs into one object a run, for `terakoya report` to show side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.folder_kinds import distinct_names
from terakoya.json_settings import leaves
from terakoya.log import format_duration, translated
from terakoya.runs import files as run_files
from terakoya.runs import metrics
from terakoya.runs import status as run_status
from terakoya.runs.idle_starts import without_idle_starts
from terakoya.runs.metrics import Curves
from terakoya.runs.status import RunStatus

SHOWN_HOSTS = 4
"""How many machines of a start are named."""


@dataclass(frozen=True)
class RunReport:
    """One run.

    Attributes:
        label: the run's unique name in the report.
        anomalies: step and description of each spike, each step that was not finite, and each time that the run went
            back to a checkpoint.
        parameters: the settings by key path, as JSON values.
        facts: the run's progress, devices and rates by name, formatted.
        stores: the token stores: path, purpose, documents, tokens, fingerprint, formatted.
        versions: the versions of the programs that it ran with, by name.
        phases: the starts of the run and the stages of its data, formatted.
        profile: the time of each phase of profiled steps, by rank, formatted.
        task_scores: what event plugins measured of checkpoints by fine-tuning them, by step, formatted.
        samples: step -> text -> what the model said about it.
    """

    label: str
    status: RunStatus
    curves: Curves
    anomalies: Sequence[tuple[int, str]]
    parameters: Mapping[str, Any]
    facts: Mapping[str, str]
    stores: Sequence[Mapping[str, str]]
    versions: Mapping[str, str]
    phases: Sequence[Mapping[str, str]] = ()
    profile: Sequence[Mapping[str, str]] = ()
    task_scores: Sequence[Mapping[str, str]] = ()
    samples: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


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
    written = without_idle_starts(metrics.read(folder))
    saved = run_files.find_checkpoints(folder)
    manifest = run_files.read_manifest(saved[-1].folder) if saved else {}
    starts = written.of_kind("start")
    start = {**manifest, **(starts[-1] if starts else {})}
    settings = run_files.read_parameters(folder) or manifest.get("parameters", {})
    return RunReport(
        label=label,
        status=status,
        curves=metrics.curves(written),
        anomalies=[
            (int(record.get("step") or 0), f"{kind}: {record.get('text')}")
            for kind in ("skipped", "spike", "rollback")
            for record in metrics.anomalies(written, kind)
            if record.get("reason") != "overflow"  # usual in fp16
        ],
        parameters=dict(leaves(settings)),
        facts=_facts(status, written, start),
        stores=_stores(settings, start.get("stores", {})),
        versions={str(name): str(version) for name, version in start.get("versions", {}).items()},
        phases=[*_starts(written, status), *_stages(settings, status)],
        profile=_profile(written),
        task_scores=_task_scores(written),
        samples=_samples(written),
    )


def _starts(written: metrics.Metrics, status: RunStatus) -> list[dict[str, str]]:
    starts: list[dict[str, str]] = []
    ends: dict[int, str] = {}
    for record in written.records:
        kind, step = record.get("kind"), int(record.get("step") or 0)
        if kind == "start":
            world, devices = record.get("world", {}), record.get("devices") or {}
            where = ", ".join(f"{count} x {name}" for name, count in devices.items())
            where = where or f"{world.get('processes', 1)} x {world.get('device', 'unknown device')}"
            hosts = [str(host) for host in record.get("hosts", ())]
            if hosts:
                where += f", {', '.join(hosts[:SHOWN_HOSTS])}" + (", ..." if len(hosts) > SHOWN_HOSTS else "")
            began = datetime.fromtimestamp(record["time"]).astimezone() if "time" in record else None
            name = f"{translated('start')} {len(starts) + 1}"
            starts.append(
                {
                    "phase": name, "from step": f"{step + 1:,}", "to step": f"{step:,}",
                    "began": began.strftime("%Y-%m-%d %H:%M") if began else "", "what": where,
                }
            )  # fmt: skip
        elif starts and kind in ("step", "checkpoint", "finished", "stopped"):
            starts[-1]["to step"] = f"{step:,}"
        if starts and kind == "rollback":  # written before the process starts again
            back_to = int(record.get("back_to") or 0)
            ends[len(starts)] = f"went back to step {back_to:,}"
        if starts and kind in ("finished", "stopped", "error"):
            reason = record.get("reason") or record.get("text")
            ends[len(starts)] = ("failed" if kind == "error" else kind) + (f": {reason}" if reason else "")
    alive = len(starts) if status.process is not None else None
    for number, each in enumerate(starts, 1):
        each["what"] += f"; {ends.get(number) or ('trains now' if number == alive else 'killed')}"
    return starts


def _stages(settings: Mapping[str, Any], status: RunStatus) -> list[dict[str, str]]:
    if status.phases:
        return [_phase_row(phase, status) for phase in status.phases]
    data = settings.get("data", {})
    stages = data.get("stages") or ()
    if not stages:
        return []
    firsts = [1, *(int(stage.get("from_step", 1)) for stage in stages)]
    lasts = [*(first - 1 for first in firsts[1:]), status.max_steps]
    phases = []
    for number, (first, last, stage) in enumerate(zip(firsts, lasts, [data, *stages], strict=True), 1):
        stores = [each.get("store", "") if isinstance(each, dict) else str(each) for each in stage.get("train", ())]
        now = "; now" if first <= status.step + 1 and (last is None or status.step < last) else ""
        phases.append(
            {
                "phase": f"data stage {number}", "from step": f"{first:,}", "began": "",
                "to step": "" if last is None else f"{last:,}", "what": ", ".join(stores) + now,
            }
        )  # fmt: skip
    return phases


def _phase_row(phase: Mapping[str, Any], status: RunStatus) -> dict[str, str]:
    first, last = phase["first_step"] + 1, phase["first_step"] + phase["steps"]
    now = "; now" if first <= status.step + 1 <= last else ""
    return {
        "phase": f"phase {phase['number']}" + (f", {phase['name']}" if phase["name"] else ""),
        "from step": f"{first:,}", "began": "", "to step": f"{last:,}",
        "what": f"{phase['global_rows']:,} rows of {phase['sequence_length']:,} tokens a step{now}",
    }  # fmt: skip


def _profile(written: metrics.Metrics) -> list[dict[str, str]]:
    """Returns the milliseconds of each phase of a step in the last profile, of each rank; the slowest is marked."""
    for record in reversed(written.of_kind("profile")):
        slowest = record.get("slowest_rank")
        return [
            {"rank": f"{rank}{', slowest' if rank == slowest else ''}"}
            | {"steps": f"{record.get('first')} to {record.get('step')}"}
            | {name: _number(value, "{:,.1f}") for name, value in times.items()}
            for rank, times in enumerate(record.get("milliseconds", []))
        ]
    return []


def _task_scores(written: metrics.Metrics) -> list[dict[str, str]]:
    found = {record.get("scored_step", 0): record.get("scores", {}) for record in written.of_kind("task_scores")}
    return [
        {"step": f"{step:,}"} | {name: _number(value, "{:.4f}") for name, value in scores.items()}
        for step, scores in sorted(found.items())
    ]


def _samples(written: metrics.Metrics) -> dict[int, dict[str, str]]:
    samples: dict[int, dict[str, str]] = {}
    for record in written.records:
        step = int(record.get("step") or 0)
        if record.get("kind") == "resume":
            samples = {at: answers for at, answers in samples.items() if at <= step}
        elif record.get("kind") == "sample":
            masks = record.get("masks") or ()
            words = [" ".join(f"{token} {share:.0%}" for token, share in mask) for mask in masks]
            answer = record.get("continuation") or " | ".join(words)
            samples.setdefault(step, {})[str(record.get("text"))] = str(answer)
    return samples


def _facts(status: RunStatus, written: metrics.Metrics, start: Mapping[str, Any]) -> dict[str, str]:
    steps = metrics.kept_steps(written)
    world = start.get("world", {})
    devices = start.get("devices") or {world.get("device", "unknown"): world.get("processes", 1)}
    hours = metrics.curves(written, ["loss"]).points.get("loss", [])
    checkpoint = status.checkpoint
    facts = {
        "state": status.told,
        "forked from": status.forked_from or "",
        "steps": f"{status.step:,}" + (f" / {status.max_steps:,}" if status.max_steps else ""),
        "tokens": f"{status.tokens:,}" + (f" / {status.max_tokens:,}" if status.max_tokens else ""),
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
        "rollbacks": str(status.rollbacks or ""),
        "last checkpoint": "none"
        if checkpoint is None
        else f"{checkpoint.name}, {translated(f'{format_duration(checkpoint.age)} ago')}",
    }
    return {name: value for name, value in facts.items() if value}


def _stores(settings: Mapping[str, Any], fingerprints: Mapping[str, str]) -> list[dict[str, str]]:
    data, phases = settings.get("data", {}), settings.get("phases") or ()
    of_phases = [(each.get("data") or {}).get("train") for each in phases]
    mixtures = {} if phases and all(of_phases) else {"training": data.get("train", ())}
    mixtures |= {
        f"training, data stage {n}": each.get("train", ()) for n, each in enumerate(data.get("stages") or (), 2)
    }
    mixtures |= {f"training, phase {n}": mixture or () for n, mixture in enumerate(of_phases, 1)}
    used = [(each.get("store", ""), f"{purpose}, weight {each.get('weight', 1):g}") if isinstance(each, dict)
            else (str(each), purpose) for purpose, mixture in mixtures.items() for each in mixture]  # fmt: skip
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
