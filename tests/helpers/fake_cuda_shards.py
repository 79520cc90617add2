"""What a process of two does under `fully_shard` on fake_cuda's machine: reads `{"NAME": PARAMETERS}` and prints the
kernels and the bytes of a further micro-step of each, and where it waits, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any
from unittest import mock

import fake_cuda
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # torch's collectives on tensors without data
from torch.testing._internal.distributed.fake_pg import FakeStore

from terakoya.checking.synthetic_rows import full_rows
from terakoya.components import ModuleBuild
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.training.batches import to_device
from terakoya.training.engines import build as engines
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.model.build import build_module_for_training
from terakoya_contract.toy import VOCABULARY
from terakoya_parallel.held_module import SHARE
from terakoya_parallel.mesh import ProcessMesh


def take(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """What the second micro-step does, whose gradients are added to those of the first."""
    parameters = Parameters.from_dict(raw, source=name)
    topology = Topology(tuple(ProcessInfo(each, 0, each, "here") for each in range(2)))
    context = DistributedContext(0, 2, fake_cuda.DEVICE, topology, None, None)
    with mock.patch.multiple(torch.cuda, device_count=lambda: 1, current_device=lambda: 0, is_available=lambda: True):
        mesh = ProcessMesh.of(context, parameters.parallel).device_mesh(("dp_replicate",), SHARE)  # it needs numbers
    with mock.patch.object(ProcessMesh, "device_mesh", lambda *_: mesh), fake_cuda.machine() as machine:
        module = build_module_for_training(parameters, VOCABULARY).to(fake_cuda.DEVICE)
        run = ModuleBuild(parameters, VOCABULARY, context)
        rows = parameters.micro_batch_size
        assert rows is not None
        engine = engines.build(module, run, micro_steps=2, micro_batch_size=rows)
        assert isinstance(engine, DDPEngine)
        layout = parameters.objective.row_layout()
        full = full_rows(layout, VOCABULARY, rows=rows, sequence_length=parameters.data.sequence_length)
        batch = to_device(parameters.objective.collate(full, VOCABULARY), fake_cuda.DEVICE, flash=False)
        for _ in range(2):
            machine.clear()
            engine.micro_step(batch, lambda sums: torch.stack([*sums.values()]).sum(), last=False)
        return {"kernels": machine.kernels, "bytes": machine.bytes, "waits": machine.places}


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with contextlib.redirect_stdout(sys.stderr):
        seen = {name: take(name, raw) for name, raw in cases.items()}
    sys.stdout.write(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # torch's threads for a card that is not there sometimes abort the end of the interpreter
