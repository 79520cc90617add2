"""Jobs of `worlds` under `fully_shard`. One with `poison` takes steps whose gradient is not a number, then one whose
is, and writes what became of the weights; one with `gradients` takes one step and writes, beside its gradients, what
each process held."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import worlds
from deepspeed_worker import poison
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from worlds import Job

from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.engine import LossFn
from terakoya.training.trainer import Trainer


def fixed_sample(odds: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens that no rounding can change; the right one often enough."""
    drawn = (batch["sample_uniforms"] * odds.shape[1]).long()
    return drawn.where(drawn % 3 != 0, batch["masked_labels"].clamp(min=0))


def run(jobs: Sequence[Job], context: DistributedContext) -> None:
    """Runs `jobs` one after another."""
    for job in jobs:
        (gradients if job.get("gradients") else train)(job, context)


def train(job: Job, context: DistributedContext) -> None:
    """Trains a job to its end, or poisons it."""
    trainer = worlds.trainer(job, context)
    if job.get("poison"):
        poison(trainer, Path(job["out"]))
    else:
        trainer.train()
    trainer.run_log.close()


def gradients(job: Job, context: DistributedContext) -> None:
    """Writes of the first step `gradients.safetensors`, by name and whole, and `held.json`: the loss, the norm, and by
    rank how many numbers of weights it held and after each micro-step how many of summed gradients. Of another engine
    the gradients alone."""
    out, trainer = Path(job["out"]), worlds.trainer(job, context)
    engine: Any = trainer.engine
    if hasattr(engine.module, "sample"):
        engine.module.sample = fixed_sample
    if not getattr(engine, "groups", None):
        whole = watch_whole(engine)
        trainer.one_step()
        if context.is_main:
            save_file(whole, out / "gradients.safetensors")
        return
    whole, reduced = watch(trainer)
    values = trainer.one_step().values
    assert values is not None
    held = context.gather([sum(shard.numel() for shard in engine.trained.values()), reduced])
    if context.is_main:
        save_file(whole, out / "gradients.safetensors")
        facts = {
            "loss": values["loss"],
            "grad_norm": values["grad_norm"],
            "groups": len(engine.groups[0]),
            "held": held,
        }
        (out / "held.json").write_text(json.dumps(facts))


def watch_whole(engine: Any) -> dict[str, Tensor]:
    """What fills, as DDP's `engine` takes a step, with its gradients before they are clipped."""
    whole: dict[str, Tensor] = {}
    clip = engine.clip

    def copied() -> Tensor:
        whole.update({name: value.grad.clone() for name, value in engine.module.named_parameters()})
        norm: Tensor = clip()
        return norm

    engine.clip = copied
    return whole


def watch(trainer: Trainer) -> tuple[dict[str, Tensor], list[int]]:
    """Two that fill as `trainer` takes a step: its gradients before they are clipped, and after each micro-step how
    many numbers this process has of gradients that were added up."""
    engine: Any = trainer.engine
    whole: dict[str, Tensor] = {}
    reduced: list[int] = []
    clip, micro_step = engine.clip, engine.micro_step

    def gathered() -> Tensor:
        shapes = {name: value.shape for name, value in engine.module.named_parameters()}
        mesh = engine.processes.device_mesh(("dp_replicate",), ("dp_shard", "sp"))
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        for name, shard in engine.trained.items():
            assert shard.grad is not None, name
            of = {"shape": shapes[name], "stride": shard.grad.new_empty(shapes[name], device="meta").stride()}
            whole[name] = DTensor.from_local(shard.grad, mesh, placements, run_check=False, **of).full_tensor()
        norm: Tensor = clip()
        return norm

    def watched(batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        sums: Mapping[str, Tensor] = micro_step(batch, loss_fn, last=last)
        values = engine.trained.values() if last else engine.sharded.values()
        gradients = [value.grad for value in values if value.grad is not None]
        reduced.append(sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in gradients))
        return sums

    engine.clip, engine.micro_step = gathered, watched
    return whole, reduced
