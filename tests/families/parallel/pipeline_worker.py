"""Jobs of `worlds` in which each process writes down its gradients of every step, before they are clipped, and the
weights it ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import toy
import worlds
from safetensors.torch import load_file, save_file
from worlds import Job

from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.trainer import Trainer


def run(jobs: Sequence[Job], nodes: Sequence[int], *, replica_size: int = 1) -> str:
    """Runs `jobs` in a world with `nodes[i]` processes on pretended node i; returns what all printed."""
    started = worlds.start(partial(_work, jobs), nodes, Path(jobs[0]["out"]).parent / "said", replica_size=replica_size)
    toy.finish(started)
    return "\n".join(each.output.read_text() for each in started)


def gradients(out: Path, step: int) -> dict[str, torch.Tensor]:
    """The gradients of `step`, counted from 0, of all processes."""
    return _merged(sorted(out.glob(f"gradients-{step}.*")))


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The parameters that all processes ended with."""
    return _merged(sorted(out.glob("weights.*")))


def _merged(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The tensors of `files`; of those that several have, all have the same bits."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        for name, value in load_file(file).items():
            assert torch.equal(found.setdefault(name, value).nan_to_num(), value.nan_to_num()), name
    return found


def _work(jobs: Sequence[Job], context: DistributedContext) -> None:
    for job in jobs:
        _run(job, context)


def _run(job: Job, context: DistributedContext) -> None:
    """Trains one job to its end."""
    out = Path(job["out"])
    trainer = worlds.trainer(job, context)
    _watch(trainer, out)
    trainer.train()
    save_file({name: value.detach() for name, value in _named(trainer)}, out / f"weights.{context.rank}")
    trainer.run_log.close()


def _named(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    assert isinstance(trainer.engine, DDPEngine)
    return trainer.engine.named_parameters()


def _watch(trainer: Trainer, out: Path) -> None:
    """Lets every step write its gradients down before it clips them."""
    engine: Any = trainer.engine
    clip = engine.clip

    def watched() -> torch.Tensor:
        found = {name: each.grad.clone() for name, each in _named(trainer) if each.grad is not None}
        save_file(found, out / f"gradients-{trainer.run.step}.{trainer.run.rank}")
        norm: torch.Tensor = clip()
        return norm

    engine.clip = watched
