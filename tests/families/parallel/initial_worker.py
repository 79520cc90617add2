"""Jobs of `worlds` that build a run and take no step: each writes its weights as a checkpoint has them, those with
`model` also the models in Transformers' format. `RANK.json` has bytes of what each process held: its `own` part, and
the `most` at once in the beginning, and on rank 0 beside its part while it wrote models, `writing`.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import worlds
from memory_worker import most_at_once
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from worlds import Job

from terakoya.distributed.context import DistributedContext
from terakoya.training.checkpoint import state
from terakoya.training.saving import ModelFolders, write_model_folders
from terakoya.training.start import warm_up


def run(jobs: Sequence[Job], context: DistributedContext) -> None:
    """Builds each job."""
    warm_up.settle_buckets = lambda *_: None  # its gradients are no part of the start
    for job in jobs:
        out = Path(job["out"])
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer = worlds.trainer(job, worlds.in_replicas(job, context))
        engine: Any = trainer.engine
        held = [value.to_local() if isinstance(value, DTensor) else value for value in engine.module.parameters()]
        found = {"own": sum(each.nbytes for each in held), "most": max(most_at_once(profiler))}
        if context.is_main:
            (out / "state").mkdir()
        context.barrier()
        written = state.write(out / "state", context.rank, engine)
        assert not written.not_finite, written.not_finite
        context.barrier()
        if job.get("model") and context.is_main:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                run = trainer.run
                folders = ModelFolders(None, run.parameters, run.vocabulary, True, run.tokenizer_folder, None)
                write_model_folders(out, folders=folders)
            sizes = {path.stat().st_size for path in (out / "state").iterdir()}
            found["writing"] = max(most_at_once(profiler, mapped=sizes))
        (out / f"{context.rank}.json").write_text(json.dumps(found))
        trainer.run_log.close()
