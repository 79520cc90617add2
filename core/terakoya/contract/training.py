"""A run from beginning to end at toy size: learns, is stopped and resumed, exported, loaded with plain Transformers."""

from __future__ import annotations

import io
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from pydantic import ValidationError

from terakoya.components import Architecture, Objective, Optimizer
from terakoya.config.parameters import Parameters
from terakoya.contract import settings, toy
from terakoya.contract.findings import Check, NotLookedAt, Wrong
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.training.setup import train_here

STEPS = 40
HIGH_RATE = 0.01
PARTS = ("architectures", "objectives", "optimizers", "schedules")


class Unfit(NotLookedAt):
    """These components do not go together."""


def run(names: Mapping[str, str], folder: Path) -> None:
    """Trains the registered components `names` (kind -> name, all of PARTS) in the new folder `folder`.

    Raises:
        Unfit: the architecture has no head that the objective asks for.
        Wrong: it does not learn, a resumed run is not the run that was never stopped, or the export does not load.
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
            continue  # it has no such layout
        if objective.row_layout().kind != "packed" or components["architectures"].isolation != "none":
            break
    else:
        raise Unfit("the objective packs rows, and the architecture cannot keep documents in one row apart")
    architecture = toy.settings(components["architectures"])
    assert isinstance(architecture, Architecture)
    try:
        objective.build(architecture, toy.VOCABULARY)
    except UserError as error:
        raise Unfit(str(error)) from error
    store = toy.store_for(objective.row_layout(), folder / "data")
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
            "optimizer": {"learning_rate": _rate(components["optimizers"]), **values["optimizers"]},
            "schedule": values["schedules"],
            "batch_size": {"-1": 16},
            "micro_batch_size": 8,
            "max_steps": STEPS,
            "logging_steps": 10,
            "evaluation": {"steps": STEPS // 4, "batches": 1} if validates else None,
            "checkpoint": {"save_steps": STEPS // 2, "model": "last"},
            "seed": 1,
        },
        source="a toy run",
    )
    with _quiet():
        train_here(parameters, folder / "run")
    course = _losses(folder / "run")
    if not course[-1] < course[0] - 0.1:
        raise Wrong(f"it does not learn: the loss of {STEPS} steps went from {course[0]:.4g} to {course[-1]:.4g}")
    last = folder / "run" / "checkpoints" / f"step-{STEPS:08d}"
    weights = _weights(last)
    shutil.rmtree(last)
    with _quiet():
        train_here(parameters, folder / "run")
    if _losses(folder / "run") != course or _weights(last) != weights:
        raise Wrong(
            "a run that was stopped and resumed is not the run that was never stopped; is there a generator, or state "
            "outside of the module's and the optimizer's state_dict?"
        )
    done = export(folder / "run", folder / "model")
    for name, auto in done.models.items():
        _, report = getattr(transformers, auto).from_pretrained(
            done.out / name,
            local_files_only=True,
            trust_remote_code=name in done.own_code,
            output_loading_info=True,
        )
        lacking = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
        if lacking:
            raise Wrong(f"the export misses weights, or has some too many: {', '.join(lacking[:5])}")


def _rate(optimizer: type[Optimizer]) -> float:
    """A learning rate that a toy run learns with: the optimizer's own, if that is high enough."""
    own = optimizer.model_fields["learning_rate"].default
    return max(HIGH_RATE, own) if isinstance(own, float) else HIGH_RATE


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what a run says of itself."""
    logger = logging.getLogger("terakoya")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _losses(run_folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    by_step = {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
    return [by_step[step] for step in sorted(by_step)]


def _weights(checkpoint: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((checkpoint / "state").glob("model-*.safetensors"))]


def partners(kind: str, name: str) -> Iterator[dict[str, str]]:
    """What to train `name` with: the first of each other kind, and every objective or architecture that may fit."""
    known = {each: [name] if each == kind else registry().names(each) for each in PARTS}
    lacking = [each for each, names in known.items() if not names]
    if lacking:
        raise NotLookedAt(f"no {lacking[0]} are installed")
    optimizers = known["optimizers"]  # one that looks at each weight alone is the plainest
    optimizer = next(
        (each for each in optimizers if registry().component("optimizers", each).elementwise), optimizers[0]
    )
    for architecture in known["architectures"]:
        for objective in known["objectives"]:
            yield dict(zip(PARTS, (architecture, objective, optimizer, known["schedules"][0]), strict=True))


def whole_run(subject: settings.Subject) -> None:
    """A toy run learns, resumes to the bit, is exported and loaded with plain Transformers."""
    reasons: list[str] = []
    for names in partners(subject.kind, subject.name):
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(names, Path(folder))
            except Unfit as error:
                reasons.append(str(error))
            else:
                return
    raise NotLookedAt("nothing installed goes with it: " + "; ".join(dict.fromkeys(reasons)))


CHECKS: Sequence[Check] = (whole_run,)
