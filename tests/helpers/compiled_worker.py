"""Jobs of `worlds` whose blocks are compiled by a compiler that writes no kernels. One with `uncompiled` runs the same
blocks as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import worlds
from torch._dynamo.utils import counters
from worlds import Job

from terakoya.training.distributed.context import DistributedContext
from terakoya.training.model import compilation


def work(jobs: Sequence[Job], context: DistributedContext) -> None:
    """Trains `jobs` to their ends. Each process writes `graphs-RANK.json` of each: how many graphs there are, and the
    reasons for breaks in them."""
    for job in jobs:
        compilation.BACKEND = job.get("compiler", "aot_eager")
        torch._dynamo.reset()
        counters.clear()
        with compilation.run_uncompiled(bool(job.get("uncompiled"))):
            trainer = worlds.trainer(job, worlds.in_replicas(job, context))
            trainer.train()
        trainer.run_log.close()
        found = {"graphs": counters["stats"].get("unique_graphs", 0), "breaks": list(counters["graph_break"])}
        (Path(job["out"]) / f"graphs-{context.rank}.json").write_text(json.dumps(found))
