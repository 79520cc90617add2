"""Jobs of `worlds` in fp8 on CPUs, where torchao emulates the products. A job may have

float32     what is not in 8 bits is in float32, and not in bf16
separate    each process scales its parts by their own largest values
compiled    blocks are compiled, by a compiler that writes no kernels
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import worlds
from torch import Tensor
from torch._dynamo.utils import counters
from worlds import Job

from terakoya.distributed.context import DistributedContext
from terakoya.training.engines import engine
from terakoya.training.model import compilation
from terakoya_parallel.tensor_layers import ProcessTensorParallelGroup
from terakoya_precision import fp8

ALL_REDUCE = ProcessTensorParallelGroup.all_reduce


def work(jobs: Sequence[Job], context: DistributedContext) -> None:
    """Trains `jobs` to their ends; writes `graphs.json`, how many graphs there are and the reasons for breaks."""
    warnings.filterwarnings("ignore", "In CPU autocast")
    for job in jobs:
        torch._dynamo.reset()
        counters.clear()
        dtype = torch.float32 if job.get("float32") else torch.bfloat16
        with (
            emulated(),
            patch.object(engine, "autocast_dtype", lambda _, dtype=dtype: dtype),
            patch.object(ProcessTensorParallelGroup, "all_reduce", keep_part if job.get("separate") else ALL_REDUCE),
            patch.object(compilation, "BACKEND", "aot_eager"),
            compilation.run_uncompiled(not job.get("compiled")),
        ):
            worlds.train([job], context)
        if context.is_main:
            found = {"graphs": counters["stats"]["unique_graphs"], "breaks": list(counters["graph_break"])}
            (Path(job["out"]) / "graphs.json").write_text(json.dumps(found))


@contextmanager
def emulated() -> Iterator[None]:
    """While open, fp8 runs on a CPU."""
    recipe = fp8._recipe()
    recipe.config = replace(recipe.config, emulate=True)
    with patch.object(fp8, "_recipe", lambda: recipe), patch.object(fp8, "check", lambda device: None):
        yield


def keep_part(group: ProcessTensorParallelGroup, values: Tensor, *, largest: bool = False) -> Tensor:
    """`all_reduce` that exchanges no largest value of an operand, which is a scalar."""
    return values.clone() if largest and values.ndim == 0 else ALL_REDUCE(group, values, largest=largest)
