"""What Muon adds to a step of the demo's recipe: CPU time beside the same recipe with AdamW, in turns.

    python tools/bench/muon.py                     on this processor as it is
    python tools/bench/muon.py --avx2              as on a processor that has neither AVX-512 nor bf16

One thread. Each contestant is a process of its own; the store is that of `terakoya demo`. Exits with 1 above the goal.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
GOAL = 1.3


def main(arguments: list[str] | None = None) -> int:
    """Prints each turn and the ratio. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--avx2", action="store_true", help="imitate a processor with AVX2 alone")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    given = parser.parse_args(arguments)
    os.environ.update({"OMP_NUM_THREADS": "1", **(AVX2 if given.avx2 else {})})  # read when torch is imported
    import torch
    from ours import train
    from turns import median, race

    from terakoya.toolkit.fast_products import describe_processor
    from terakoya_pipeline.demo import Demo
    from terakoya_pipeline.run import run_pipeline

    print(describe_processor(torch.device("cpu")))
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(Path(folder) / "demo")
        pipeline = demo.write(max_steps=2)
        list(run_pipeline(pipeline.model_copy(update={"training_processes": 1})))
        recipe = {**pipeline.parameters, "schedule": {"type": "constant"}, "checkpoint": {"save_steps": 10**6}}
        recipe["data"] = {**recipe["data"], "train": [{"store": str(pipeline.store), "weight": 1.0}]}
        del recipe["evaluation"]
        muon = recipe["optimizer"]
        adamw = {"type": "adamw", "learning_rate": muon["learning_rate"], "weight_decay": muon["weight_decay"]}
        contestants = {
            name: partial(train, raw={**recipe, "optimizer": optimizer}, steps=given.steps)
            for name, optimizer in (("muon", muon), ("adamw", adamw))
        }
        turns = race(contestants, given.rounds)
    ratio = median(turns["adamw"], "cpu") / median(turns["muon"], "cpu")
    print(f"a step with Muon takes {ratio:.2f} x the CPU time of one with AdamW (goal {GOAL})")
    return int(ratio > GOAL)


if __name__ == "__main__":
    sys.exit(main())
