"""Measures the differences between two runs, from their checkpoints and exports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from terakoya.conversion import export as export_model
from terakoya.runs import checkpoints
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.engines.tensor_shards import KINDS, Kind

FIRST_MOMENT = "/exp_avg"
"""Ending of the names of first moments in the optimizer's state: after one step the gradient, times a constant."""


def checkpoint_folder(out: Path, step: int) -> Path:
    """The folder of the checkpoint of `step` in the run folder `out`."""
    return out / "checkpoints" / checkpoints.folder_name(step)


def saved_step(out: Path) -> int:
    """The step of the run's newest checkpoint; 0 without checkpoints."""
    return max((step for step, _ in checkpoints.list_checkpoints(out / "checkpoints")), default=0)


def state(out: Path, kind: Kind, step: int) -> dict[str, Tensor]:
    """Returns the whole tensors, "model" or "optimizer", of a checkpoint."""
    read = checkpoint_state.SavedState(checkpoint_folder(out, step), kind)
    return {name: read(name) for name in read.names()}


def relative_error(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The norm of all differences over the norm of all `expected`; infinite where names or shapes differ."""
    if got.keys() != expected.keys() or any(got[name].shape != expected[name].shape for name in expected):
        return float("inf")
    difference, norm = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for name, value in expected.items():
        difference += (got[name].double() - value.double()).square().sum()
        norm += value.double().square().sum()
    return float((difference / norm).sqrt())


def gradients(out: Path, reference: Path, step: int) -> float:
    """The error of the first moments, which average the gradients of the steps up to `step`."""
    moments = []
    for run in (out, reference):
        tensors = state(run, "optimizer", step)
        moments.append({name: value for name, value in tensors.items() if name.endswith(FIRST_MOMENT)})
        assert moments[-1], f"{run}: the optimizer keeps no first moment"
    return relative_error(*moments)


def weights(out: Path, reference: Path, step: int) -> float:
    """The error of the weights."""
    return relative_error(state(out, "model", step), state(reference, "model", step))


def difference(out: Path, straight: Path, step: int) -> float:
    """The largest difference in weights, the optimizer's state and logged losses; 0 if all have the same bits."""
    differences = [relative_error(state(out, kind, step), state(straight, kind, step)) for kind in KINDS]
    first, second = losses(out), losses(straight)
    same_steps = first.keys() == second.keys()
    differences.append(max(abs(first[each] - second[each]) for each in first) if same_steps else float("inf"))
    return max(differences)


def losses(out: Path) -> dict[int, float]:
    """The loss of each step; of a step that ran twice, the later one."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def export(out: Path) -> None:
    """Exports the run's last checkpoint into a folder next to the run."""
    export_model.export(out, out.with_name(f"{out.name}.export"))


def exports(out: Path, reference: Path) -> float:
    """The error of the weights of two runs' exports."""
    exported = []
    for run in (out, reference):
        folder = run.with_name(f"{run.name}.export")
        files = sorted(folder.rglob("*.safetensors"))
        assert files, f"{folder}: no weights were exported"
        exported.append(
            {f"{file.relative_to(folder)}:{name}": value for file in files for name, value in load_file(file).items()}
        )
    return relative_error(*exported)
