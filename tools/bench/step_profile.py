"""Where the time of a step on a CPU goes: the share of matrix products, and every other kernel above 1 %.

    python tools/bench/step_profile.py bert modernbert electra llama

4 layers of 256, 32,768 pieces, 32 rows of 128, float32, one thread, AdamW, lines of random ids.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lines
import ours
from torch.profiler import ProfilerActivity, profile

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
SHOWN = 0.01
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 1024}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "bert": (PLAIN, "masked_lm"),
    "modernbert": ({"intermediate_size": 384, "max_position_embeddings": 128, "local_attention": 16}, "masked_lm"),
    "electra": ({**PLAIN, "embedding_size": 128}, "replaced_token"),
    "gpt2": ({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "causal_lm"),
    "llama": ({"intermediate_size": 688}, "causal_lm"),
}
"""What a family's architecture has beside the common sizes, and its objective."""
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


def main(arguments: list[str] | None = None) -> int:
    """Prints the shares of each family. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("families", nargs="+", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=32768, help="pieces")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        data = lines.drawn(
            Path(temporary) / "tokenizer", count=200 * given.steps, mean_length=51, sequence_length=128,
            vocabulary_size=given.vocabulary,
        )  # fmt: skip
        store = data.store(Path(temporary) / "store")
        for family in given.families:
            further, objective = FAMILIES[family]
            raw = {
                "data": {"train": [{"store": str(store.folder)}], "sequence_length": 128},
                "architecture": {"type": family, **SIZES, **further},
                "objective": {"type": objective},
                "optimizer": {"type": "adamw", "learning_rate": 1e-4},
                "schedule": {"type": "constant"},
                "precision": "fp32",
                "batch_size": {"-1": 32},
                "checkpoint": {"model": "never", "save_steps": 1_000_000},
                "trackers": [],
            }
            seen = Profiled(given.steps)
            ours.run(raw, given.steps + 2, seen)
            print(f"{family}: {shares(seen.seconds)}", flush=True)
    return 0


class Profiled:
    """Profiles so many steps after the first, whose start has random weights to make.

    Attributes:
        seconds: of each operation in these steps, by its name.
    """

    def __init__(self, steps: int) -> None:
        self._profile, self._last, self._ended = profile(activities=[ProfilerActivity.CPU]), steps + 1, 0
        self.seconds: dict[str, float] = {}

    def step_ended(self) -> None:
        """Begins after the first step, and ends after the last that is profiled."""
        self._ended += 1
        if self._ended == 1:
            self._profile.__enter__()
        elif self._ended == self._last:
            self._profile.__exit__(None, None, None)
            self.seconds = {each.key: each.self_cpu_time_total for each in self._profile.key_averages()}


def shares(seconds: dict[str, float]) -> str:
    """The share of products, then each other operation's above `SHOWN`."""
    total = sum(seconds.values())
    found = {"products": sum(seconds.get(each, 0.0) for each in PRODUCTS) / total}
    others = {name.removeprefix("aten::"): spent / total for name, spent in seconds.items() if name not in PRODUCTS}
    found |= dict(
        sorted(((name, share) for name, share in others.items() if share >= SHOWN), key=lambda each: -each[1])
    )
    return ", ".join(f"{name} {share:.1%}" for name, share in found.items())


if __name__ == "__main__":
    sys.exit(main())
