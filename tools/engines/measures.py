"""How far two runs are apart, read from their checkpoints and exports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from terakoya.conversion import export as export_model
from terakoya.training.checkpoint import checkpoint
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.engines.tensor_shards import KINDS, Kind

FIRST_MOMENT = "/exp_avg"
"""What follows a parameter's name in the optimizer's state: after one step the gradient, times a constant."""


def checkpoint_folder(out: Path, step: int) -> Path:
    """Where the run `out` keeps its checkpoint of `step`."""
    return out / "checkpoints" / checkpoint.folder_name(step)


def saved_step(out: Path) -> int:
    """The step of the run's newest checkpoint; 0 if it has none."""
    return max((step for step, _ in checkpoint.list_checkpoints(out / "checkpoints")), default=0)


def state(out: Path, kind: Kind, step: int) -> dict[str, Tensor]:
    """The whole tensors, "model" or "optimizer", of a checkpoint."""
    read = checkpoint_state.SavedState(checkpoint_folder(out, step), kind)
    return {name: read(name) for name in read.names()}


def relative_error(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The norm of all differences over the norm of all `wanted`; infinite where names or shapes differ."""
    if got.keys() != wanted.keys() or any(got[name].shape != wanted[name].shape for name in wanted):
        return float("inf")
    apart, whole = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for name, value in wanted.items():
        apart += (got[name].double() - value.double()).square().sum()
        whole += value.double().square().sum()
    return float((apart / whole).sqrt())


def gradients(out: Path, alone: Path, step: int) -> float:
    """Between first moments, averages of the gradients of the steps up to `step`."""
    found = []
    for each in (out, alone):
        moments = {name: value for name, value in state(each, "optimizer", step).items() if name.endswith(FIRST_MOMENT)}
        assert moments, f"{each}: the optimizer keeps no first moment"
        found.append(moments)
    return relative_error(*found)


def weights(out: Path, alone: Path, step: int) -> float:
    """Between weights."""
    return relative_error(state(out, "model", step), state(alone, "model", step))


def difference(out: Path, straight: Path, step: int) -> float:
    """0 if weights, the optimizer's state and logged losses of both runs are the same bits, else how far they are apart
    at most."""
    apart = [relative_error(state(out, kind, step), state(straight, kind, step)) for kind in KINDS]
    mine, theirs = losses(out), losses(straight)
    apart.append(float("inf") if mine.keys() != theirs.keys() else max(abs(mine[at] - theirs[at]) for at in mine))
    return max(apart)


def losses(out: Path) -> dict[int, float]:
    """The loss of each step; after a resume the later one stands."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def export(out: Path) -> None:
    """Exports the run's last checkpoint, beside it."""
    export_model.export(out, out.with_name(f"{out.name}.export"))


def exports(out: Path, alone: Path) -> float:
    """Between the weights of two runs' exports."""
    found = []
    for each in (out, alone):
        folder = each.with_name(f"{each.name}.export")
        files = sorted(folder.rglob("*.safetensors"))
        assert files, f"{folder}: no weights were exported"
        found.append(
            {f"{file.relative_to(folder)}:{name}": value for file in files for name, value in load_file(file).items()}
        )
    return relative_error(*found)
