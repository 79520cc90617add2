"""What a process does with a job of `worlds` whose blocks are compiled by a compiler that writes no kernels, or run as
they are. It writes `graphs-RANK.json`: how many graphs there are, and the reasons for breaks."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import torch
import worlds
from torch._dynamo.utils import counters
from worlds import Job

from terakoya.distributed.context import DistributedContext
from terakoya.training.model import compilation


def compiled(job: Job, context: DistributedContext, *, uncompiled: bool = False) -> None:
    """Trains a job to its end."""
    torch._dynamo.reset()
    counters.clear()
    with patch.object(compilation, "BACKEND", "aot_eager"), compilation.run_uncompiled(uncompiled):
        worlds.train([job], context)
    found = {"graphs": counters["stats"].get("unique_graphs", 0), "breaks": list(counters["graph_break"])}
    (Path(job["out"]) / f"graphs-{context.rank}.json").write_text(json.dumps(found))


def uncompiled(job: Job, context: DistributedContext) -> None:
    """Trains a job with the same blocks as they are."""
    compiled(job, context, uncompiled=True)
