"""What a whole step costs over a raw torch DDP loop: the same model, batches and optimizer, in the same processes.

    python tools/bench/step_overhead.py                    one process with tiny steps, two with small ones
    python tools/bench/step_overhead.py --processes 2 --size tiny small --legs 40

Each process trains as `terakoya train` does, with every bundled plugin and tracker on and its batches ready; after each
leg of ten steps it takes ten steps of the raw loop, between barriers, so that both meet the same machine: forward,
backward with DDP's reduction, clipping, fused AdamW. Wall time of the slowest process counts. What a step adds is the
median over legs of the difference to the mean of the raw legs before and after, with its standard error (0.93 of the
distance between the quartiles over the root of the number of legs: that of a median of normally spread values).
Exits with 1 above a goal: 0.5 ms on one process, 2 % on two.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lines
import loop
import numpy as np
import torch
import torch.distributed as dist
from step_clock import Clock
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from terakoya.config.parameters import Parameters
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.engines.ddp import BUFFERS_OPTION
from terakoya.training.model.build import build_module

LEG, WARM_UP, READY = 10, 3, 32
"""Steps of a leg: as many as from one logged step to the next; legs that are not counted; batches that are there."""
ALONE_MS, TOGETHER = 0.5, 0.02
"""The goals: milliseconds a step on one process, the share of a step on several."""
SIZES: Mapping[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "rows": 4, "sequence_length": 32},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "rows": 8, "sequence_length": 64},
}  # fmt: skip
"""Models and rows of a process: steps of some 10 ms, where half of one shows, and some 200 ms, as small runs have."""


class Turns(Clock):
    """A clock that lets the raw loop run after each leg of ours, and notes the wall time of both."""

    def __init__(self, legs: int, size: str, raw: Mapping[str, Any]) -> None:
        super().__init__(warm_up=0, steps=LEG * (WARM_UP + legs + 1))
        self.size, self.parameters = size, raw
        self.taken = 0
        self.raw: Raw | None = None
        self.began = 0.0
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def step_ended(self) -> None:
        """At the end of a leg: the raw loop's turn."""
        self.taken += 1
        if self.taken % LEG:
            return
        together()
        now = time.perf_counter()
        if self.raw is None:
            self.raw = Raw(self.parameters)
        else:
            self.ours.append((now - self.began) / LEG)
        started = time.perf_counter()
        self.raw.leg()
        together()
        self.began = time.perf_counter()
        self.theirs.append((self.began - started) / LEG)


class Raw:
    """The loop that anybody would write."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        settings = Parameters.from_dict(raw, source="step_overhead.py")
        store = TokenStore.open(settings.data.train[0].store)
        vocabulary = store.facts.vocabulary
        module = build_module(settings, vocabulary)
        attention.use(module, "sdpa")
        module.train()
        self.module: nn.Module = module
        if dist.is_initialized():
            options: dict[str, Any] = {BUFFERS_OPTION: False}
            self.module = DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
        self.optimizer = settings.optimizer.build(module, fused=True)
        length, rows = settings.data.sequence_length, sum(settings.batch_size.values())
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        source = RowSource(store, settings.objective.row_layout(), sequence_length=length, seed=0)
        mine = np.arange(rows // ranks) + rank * (rows // ranks)
        made = [settings.objective.collate(source.load(0, mine + number * rows), vocabulary) for number in range(READY)]
        batches: list[tuple[dict[str, Tensor], int]] = [
            ({name: torch.from_numpy(array) for name, array in batch.arrays.items()}, batch.counts["masked"])
            for batch in made
        ]
        self.batches = cycle(batches)

    def leg(self) -> None:
        """`LEG` steps."""
        for _ in range(LEG):
            batch, masked = next(self.batches)
            loss = self.module(batch)["mlm_loss"] / masked
            loss.backward()
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> int:
    """Prints a line for each number of processes and size. Returns the exit status."""
    arguments = _arguments()
    if arguments.worker:
        return work(json.loads(arguments.worker))
    status = 0
    for processes in arguments.processes:
        for size in arguments.size or ["tiny" if processes == 1 else "small"]:
            with tempfile.TemporaryDirectory() as folder:
                legs = race(processes, size, arguments.legs, Path(folder))
            status |= report(processes, size, *legs)
    return status


def race(processes: int, size: str, legs: int, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds a step of our legs and of the raw ones, one more, of the slowest of `processes`."""
    shape = SIZES[size]
    data = lines.drawn(
        folder / "tokenizer", count=4000, mean_length=20, sequence_length=shape["sequence_length"], vocabulary_size=1000
    )
    raw = parameters(data.store(folder / "store"), shape, processes)
    job = json.dumps({"raw": raw, "size": size, "legs": legs, "out": str(folder)})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", job],
            env={**os.environ, **(world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})},
        )
        for rank in range(processes)
    ]
    if any([each.wait() for each in started]):
        raise RuntimeError("a process failed; what it said stands above")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    slowest = {name: [max(each) for each in zip(*(one[name] for one in found), strict=True)] for name in found[0]}
    return slowest["ours"], slowest["theirs"]


def work(job: Mapping[str, Any]) -> int:
    """One process of a race."""
    clock = Turns(job["legs"], job["size"], job["raw"])
    loop.run_ready(job["raw"], clock, Path(job["out"]) / "run")
    rank = int(os.environ.get("RANK", "0"))
    (Path(job["out"]) / f"{rank}.json").write_text(json.dumps({"ours": clock.ours, "theirs": clock.theirs}))
    return 0


def report(processes: int, size: str, ours: Sequence[float], theirs: Sequence[float]) -> int:
    """Prints what was seen; returns 1 above the goal."""
    beside = [(before + after) / 2 for before, after in pairwise(theirs)]
    pairs = list(zip(ours, beside, strict=True))[WARM_UP:]
    added = [1000 * (mine - raw) for mine, raw in pairs]
    shares = [mine / raw - 1 for mine, raw in pairs]
    middle, share = statistics.median(added), statistics.median(shares)
    error, share_error = _median_error(added), _median_error(shares)
    raw_ms = 1000 * statistics.median(raw for _, raw in pairs)
    goal = f"goal {ALONE_MS} ms" if processes == 1 else f"goal {100 * TOGETHER:.0f} %"
    print(
        f"{processes} process{'es' if processes > 1 else ''}, {size}: raw loop {raw_ms:.3f} ms a step, ours "
        f"{middle:+.3f} ± {error:.3f} ms ({100 * share:+.2f} ± {100 * share_error:.2f} %), {len(added)} legs ({goal})",
        flush=True,
    )
    return int(middle > ALONE_MS if processes == 1 else share > TOGETHER)


def parameters(store: TokenStore, shape: Mapping[str, int], processes: int) -> dict[str, Any]:
    """A run with every tracker there is; `shape["rows"]` rows on each process."""
    raw = loop.parameters(store)
    sizes = {key: shape[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    return {
        **raw,
        "data": {**raw["data"], "sequence_length": shape["sequence_length"]},
        "architecture": {**raw["architecture"], **sizes},
        "precision": "fp32",
        "batch_size": {"-1": shape["rows"] * processes},
    }


def _median_error(values: Sequence[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4)
    return 0.93 * (high - low) / len(values) ** 0.5


def together() -> None:
    """Returns when every process has called it."""
    if dist.is_initialized():
        dist.barrier()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size", nargs="+", choices=SIZES, help="tiny for one process, small for more, if not given")
    parser.add_argument("--legs", type=int, default=40, help=f"timed legs of {LEG} steps")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
