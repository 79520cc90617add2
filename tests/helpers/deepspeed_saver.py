"""One process of a pair that trains small models with DeepSpeed's own engine and saves its own checkpoints.

Each job is an object:

    name        the folder of its checkpoint
    model       one of `published_layouts.MODELS`
    stage       of ZeRO
    frozen      beginnings of the names of weights that are not trained
    bf16        whether the engine computes in bf16, its float32 weights being the optimizer's alone

Process 0 writes `reference.safetensors` beside each checkpoint: every weight as the engine has it, gathered whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import published_layouts as layouts
import torch
import toy
from safetensors.torch import save_file


def save(job: dict[str, Any], folder: Path) -> None:
    """Trains one job's model for two steps and saves it."""
    model = layouts.MODELS[job["model"]]().train()
    model.config.architectures = [type(model).__name__]
    for name, value in model.named_parameters():
        value.requires_grad_(not name.startswith(tuple(job.get("frozen", ()))))
    trained = [value for value in model.parameters() if value.requires_grad]
    matrices = [value for value in trained if value.ndim > 1]
    vectors = [value for value in trained if value.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=0.01)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": job.get("bf16", False)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    rank = torch.distributed.get_rank()
    for step in range(2):
        ids = torch.arange(2 * 9).reshape(2, 9) * 7 % 40 + step + 3 * rank
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    out = folder / job["name"]
    engine.save_checkpoint(str(out))
    whole = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([value] if hasattr(value, "ds_id") else []):
            whole[name] = value.detach().clone().contiguous()
    if rank == 0:
        model.config.save_pretrained(out)
        save_file(whole, out / "reference.safetensors")
    engine.destroy()


def process(jobs: Sequence[dict[str, Any]], folder: Path, variables: Mapping[str, str], output: Path) -> None:
    """One forked process with the `variables` of a launcher: runs the jobs, saves into `folder`, prints to `output`."""
    toy.become(variables, output)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__ = {}  # no kernels are compiled on a machine without a GPU
    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    for job in jobs:
        save(job, folder)
    torch.distributed.destroy_process_group()
