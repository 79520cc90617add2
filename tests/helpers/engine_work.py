"""What processes do with a job of `worlds`: they train it, and look at what their engine holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import worlds
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from worlds import Job

from terakoya.distributed.context import DistributedContext
from terakoya.training.batches import to_device
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.engines.engine import LossFn
from terakoya.training.engines.tensor_shards import KINDS
from terakoya.training.trainer import Trainer


def write(job: Job, context: DistributedContext, name: str, found: Any) -> None:
    """Writes what rank 0 has `found` to the file `name` of the run."""
    if context.is_main:
        Path(job["out"], f"{name}.json").write_text(json.dumps(found))


def train(job: Job, context: DistributedContext) -> None:
    """Trains a job to its end. Under DeepSpeed it writes `zero.json`, what the engine says itself that it does."""
    trainer = worlds.trainer(job, context)
    engine: Any = trainer.engine
    if trainer.parameters.parallel.engine == "deepspeed":
        write(job, context, "zero", json.loads(engine.wrapped._config.zero_config.model_dump_json(by_alias=True)))
    trainer.train()
    trainer.run_log.close()


def alike(job: Job, context: DistributedContext) -> None:
    """Trains; writes `alike.json`: name -> whether the weight is `whole` on each process of a replica, how many
    different values it has over all processes, and whether those at one place of their replicas have the same."""
    trainer = worlds.trainer(job, context)
    trainer.train()
    engine: Any = trainer.engine
    mine = {
        name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
        for name, value in engine.module.named_parameters()
    }
    every = context.gather(mine)
    size = context.topology.replica_size
    found = {
        name: {
            "whole": "tp" in engine.alike[name],
            "values": len({each[name] for each in every}),
            "replicas": all(each[name] == every[rank % size][name] for rank, each in enumerate(every)),
        }
        for name in mine
    }
    write(job, context, "alike", found)
    trainer.run_log.close()


def poison(job: Job, context: DistributedContext) -> None:
    """Takes two steps with a gradient that is not a number, on the last process and in the first of two micro-steps,
    and a good one. Writes `poison.json`: by process and step whether the norm was finite, and whether weights and
    optimizer stayed. Where processes divide products, the gradient is that of a weight of which each has a part."""
    trainer = worlds.trainer(job, context)
    engine: Any = trainer.engine
    divided = trainer.parameters.parallel.tp_size > 1
    loss = next(name for name, term in trainer.run.objective.terms().items() if term.weight is not None)

    def values() -> dict[str, Tensor]:
        pieces = [piece for kind in KINDS for piece in engine.shards_to_save(kind)]
        return {f"{piece.name} {piece.start}": piece.value.clone() for piece in pieces}

    found = []
    for factor in (float("nan"), float("inf"), 1.0):
        batch = to_device(trainer.batches(trainer.run.step).real[0], trainer.run.device, flash=False)
        before = values()
        for micro in range(2):
            bad = factor if micro == 0 and context.rank == context.world_size - 1 else 1.0
            scale = 0.001 * (1.0 if divided else bad)
            engine.micro_step(batch, lambda sums, scale=scale: sums[loss] * scale, last=micro == 1)
            if divided and micro == 0:
                cut = [each for name, each in engine.trained.items() if "tp" not in engine.alike[name]]
                next(each.grad for each in cut if each.grad is not None).mul_(bad)
        norm = float(engine.step(0.01))
        after = values()
        stayed = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        found.append([norm - norm == 0.0, stayed])
    write(job, context, "poison", context.gather(found))
    trainer.run_log.close()


def watch(job: Job, context: DistributedContext) -> None:
    """Trains under DeepSpeed, and writes `watched.json`: of each process how many weights were gathered while it wrote
    its part of the checkpoints, and the sizes, by name, of the parts of weights that it wrote last."""
    import deepspeed

    trainer = worlds.trainer(job, context)
    write_part, gather = checkpoint_state.write, deepspeed.zero.GatheredParameters.__enter__
    writing, gathered, sizes = [False], [0], dict[str, int]()

    def counted(self: Any) -> Any:
        gathered[0] += writing[0]
        return gather(self)

    def watched(folder: Path, rank: int, owner: Any) -> Any:
        writing[0] = True
        try:
            sizes.update({piece.name: piece.value.numel() for piece in owner.shards_to_save("model")})
            return write_part(folder, rank, owner)
        finally:
            writing[0] = False

    checkpoint_state.write, deepspeed.zero.GatheredParameters.__enter__ = watched, counted
    try:
        trainer.train()
    finally:
        checkpoint_state.write, deepspeed.zero.GatheredParameters.__enter__ = write_part, gather
    write(job, context, "watched", context.gather({"gathered": gathered[0], "sizes": sizes}))
    trainer.run_log.close()


def fixed_sample(odds: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Tokens that no rounding can change; the right one often enough."""
    drawn = (batch["sample_uniforms"] * odds.shape[1]).long()
    return drawn.where(drawn % 3 != 0, batch["masked_labels"].clamp(min=0))


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
    whole, reduced = watch_shards(trainer)
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


def watch_shards(trainer: Trainer) -> tuple[dict[str, Tensor], list[int]]:
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
