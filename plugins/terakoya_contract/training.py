"""The check of a whole run at toy size: it learns, is stopped, resumed, exported, and loaded by plain Transformers."""

from __future__ import annotations

import io
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path

from pydantic import ValidationError

from terakoya.components import Architecture, Objective, Optimizer
from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.toolkit.attributes import replace_level
from terakoya.training.setup import train_in_this_process
from terakoya_contract import settings, toy
from terakoya_contract.results import Check, CheckFailed, CheckSkipped

STEPS = 30
HIGH_RATE = 0.01
PARTS = ("architectures", "objectives", "optimizers", "schedules")


class IncompatibleComponents(CheckSkipped):
    """The components cannot be used together."""


def run(names: Mapping[str, str], folder: Path) -> None:
    """Trains the registered components `names` (kind -> name, one for each of PARTS) in the new folder `folder`.

    Raises:
        IncompatibleComponents: the architecture lacks the head or the document masking that the objective needs.
        CheckFailed: the run does not learn, a resumed run differs from an uninterrupted one, or the export does not
            load.
    """
    import transformers

    components = {kind: registry().component(kind, name) for kind, name in names.items()}
    values = {kind: {"type": names[kind], **toy.values(component)} for kind, component in components.items()}
    layouts: list[dict[str, str]] = [{}]
    if "layout" in components["objectives"].model_fields:
        layouts += [{"layout": "lines"}, {"layout": "stream"}, {"layout": "padded"}]
    for layout in layouts:
        try:
            objective: Objective = components["objectives"].model_validate(
                toy.values(components["objectives"]) | layout
            )
        except ValidationError:
            continue  # the objective has no such layout
        if objective.row_layout().kind != "packed" or components["architectures"].document_masking != "none":
            break
    else:
        raise IncompatibleComponents(
            "the objective packs rows, and the architecture cannot keep documents in one row apart"
        )
    architecture = toy.settings(components["architectures"])
    assert isinstance(architecture, Architecture)
    try:
        objective.build(architecture, toy.VOCABULARY)
    except UserError as error:
        raise IncompatibleComponents(str(error)) from error
    store = toy.make_store_for(objective.row_layout(), folder / "data")
    validates = components["schedules"].needs_validation
    parameters = Parameters.from_dict(
        {
            "data": {
                "train": [str(store.folder)],
                "validation": [str(store.folder)] if validates else [],
                "sequence_length": toy.SEQUENCE_LENGTH,
            },
            "architecture": values["architectures"],
            "objective": {**values["objectives"], **layout},
            "optimizer": {"learning_rate": _learning_rate(components["optimizers"]), **values["optimizers"]},
            "schedule": values["schedules"],
            "batch_size": {"-1": 16},
            "micro_batch_size": 8,
            "max_steps": STEPS,
            "logging_steps": 5,
            "evaluation": {"steps": STEPS // 4, "batches": 1} if validates else None,
            "checkpoint": {"save_steps": STEPS // 2, "model": "last"},
            "precision": "fp32",
            "seed": 1,
        },
        source="a toy run",
    )
    with replace_level("terakoya", logging.ERROR), redirect_stderr(io.StringIO()):
        train_in_this_process(parameters, folder / "run")
    losses = _read_losses(folder / "run")
    if not losses[-1] < losses[0] - 0.1:
        raise CheckFailed(f"it does not learn: the loss of {STEPS} steps went from {losses[0]:.4g} to {losses[-1]:.4g}")
    last = folder / "run" / "checkpoints" / f"step-{STEPS:08d}"
    weights = _read_weights(last)
    shutil.rmtree(last)
    with replace_level("terakoya", logging.ERROR), redirect_stderr(io.StringIO()):
        train_in_this_process(parameters, folder / "run")
    if _read_losses(folder / "run") != losses or _read_weights(last) != weights:
        raise CheckFailed(
            "a run that was stopped and resumed differs from one that was not; is there a random generator, or state "
            "outside the state_dict of the module and the optimizer?"
        )
    exported = export(folder / "run", folder / "model")
    for name, auto in exported.models.items():
        _, report = getattr(transformers, auto).from_pretrained(
            exported.out / name,
            local_files_only=True,
            trust_remote_code=name in exported.custom_code,
            output_loading_info=True,
        )
        mismatched = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
        if mismatched:
            raise CheckFailed(f"the export has missing or unexpected weights: {', '.join(mismatched[:5])}")


def _learning_rate(optimizer: type[Optimizer]) -> float:
    """A learning rate high enough for a toy run: the optimizer's default, at least HIGH_RATE."""
    default = optimizer.model_fields["learning_rate"].default
    return max(HIGH_RATE, default) if isinstance(default, float) else HIGH_RATE


def _read_losses(run_folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    by_step = {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
    return [by_step[step] for step in sorted(by_step)]


def _read_weights(checkpoint: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((checkpoint / "state").glob("model-*.safetensors"))]


def find_partners(kind: str, name: str) -> Iterator[dict[str, str]]:
    """Combinations of components (kind -> name) to train `name` with: every architecture with every objective, one
    optimizer and one schedule. Objectives that compare examples come last, as a toy run of theirs shows the least.
    Raises CheckSkipped where no component of a kind is installed."""
    known = {each: [name] if each == kind else registry().names(each) for each in PARTS}
    missing = [each for each, names in known.items() if not names]
    if missing:
        raise CheckSkipped(f"no {missing[0]} are installed")
    optimizers = known["optimizers"]  # an elementwise one has the fewest restrictions
    optimizer = next(
        (each for each in optimizers if registry().component("optimizers", each).elementwise), optimizers[0]
    )
    objectives = sorted(
        known["objectives"], key=lambda each: registry().component("objectives", each).compares_examples
    )
    for architecture in known["architectures"]:
        for objective in objectives:
            yield dict(zip(PARTS, (architecture, objective, optimizer, known["schedules"][0]), strict=True))


def check_training_run(case: settings.Case) -> None:
    """A toy run learns, resumes bit for bit, is exported and loaded by plain Transformers."""
    reasons: list[str] = []
    for names in find_partners(case.kind, case.name):
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(names, Path(folder))
            except IncompatibleComponents as error:
                reasons.append(str(error))
            else:
                return
    raise CheckSkipped("no installed component can be used with it: " + "; ".join(dict.fromkeys(reasons)))


CHECKS: Sequence[Check] = (check_training_run,)
