"""A CPU's step in bf16 beside one in float32, and beside one whose attention is torch's with a mask, in turns.

    python tools/bench/cpu_precision.py --store STORE --preset tiny_modernbert bert_ja_small

One thread; steps of 2,048 tokens of the store. Each contestant is a process of its own. Prints how many times faster
the first is, in CPU time; there is no goal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from ours import train
from turns import Turn, median, race

from terakoya.config.presets import presets_folder
from terakoya.toolkit.architectures import _attention_backends, _window_attention
from terakoya.toolkit.attributes import replace_attribute

TOKENS = 2048
"""Tokens of a step: the fewest that `terakoya init` gives one."""


def main(arguments: list[str] | None = None) -> int:
    """Prints each turn and the ratios. Returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--store", type=Path, required=True, help="a token store")
    parser.add_argument("--preset", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    given = parser.parse_args(arguments)
    for name in given.preset:
        raw = json.loads((presets_folder() / f"{name}.json").read_text(encoding="utf-8"))
        rows = max(1, TOKENS // raw["data"]["sequence_length"])
        raw |= {
            "schedule": {"type": "constant"}, "checkpoint": {"model": "never"}, "trackers": [],
            "batch_size": {"-1": rows}, "micro_batch_size": rows,
        }  # fmt: skip
        raw["data"] |= {"train": [str(given.store)], "validation": []}
        del raw["evaluation"]
        print(f"{name}, {rows} x {raw['data']['sequence_length']} tokens a step")
        contestants = {
            f"{precision}{', masks' if masks else ''}": partial(
                compute, raw={**raw, "precision": precision}, steps=given.steps, masks=masks
            )
            for precision in ("bf16", "fp32")
            for masks in (False, True)
        }
        turns = race(contestants, given.rounds)
        rates = {each: median(found, "cpu") for each, found in turns.items()}
        print(*(f"bf16 is {rates['bf16'] / rates[each]:.2f} x as fast as {each}" for each in list(rates)[1:]), sep="\n")
    return 0


def compute(number: int, *, raw: dict[str, Any], steps: int, masks: bool) -> Turn:
    """Trains; with `masks` attention has a mask in every layer, and the run's precision at every length."""
    with ExitStack() as held:
        if masks:
            held.enter_context(replace_attribute(_window_attention, "block_size", lambda *_: None))
            held.enter_context(replace_attribute(_attention_backends, "SHORT", 0))
        return train(number, raw, steps=steps)


if __name__ == "__main__":
    sys.exit(main())
