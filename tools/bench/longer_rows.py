"""Longer rows than a model was trained on: the loss at the new positions, before and after a short training.

    python tools/bench/longer_rows.py STORE VALIDATION_STORE

A small Llama is trained on rows of `--length`. Then it goes on for a few steps on rows `--factor` times as long, with
`rope_scaling` of each type in `--ways`, or as it is ("none"). Plain Transformers reads each exported model, and all see
the same pieces of the validation store's long documents. Printed for each: the loss at the old positions (the second
half of `--length`, where there is context) and at the new ones, in nats. Exits with 1 where after YaRN the loss at the
new positions is more than 2 % above that at the old ones, or where the model from before is not more than 10 % worse
there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.store.token_store import TokenStore
from terakoya.training.setup import train_in_this_process

NEAR, FAR = 0.02, 0.10
"""Goals: how much worse new positions may be after YaRN, and must be before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each model. Returns the exit status."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        rows = long_rows(options.validation, options.rows, options.factor * options.length)
        before = train(options, home / "short", options.length, options.steps)
        excess = {"before": _report(options, "before", before, rows)}
        for way in options.ways:
            start = {"folder": str(before), "new_positions": True}
            scaling = None if way == "none" else {"rope_type": way, "factor": options.factor}
            if way == "yarn":
                scaling = {**(scaling or {}), "original_max_position_embeddings": options.length}
            model = train(
                options, home / way, options.factor * options.length, options.more_steps, scaling=scaling, start=start
            )
            excess[way] = _report(options, way, model, rows)
    return 0 if excess["before"] > FAR and excess.get("yarn", 0) <= NEAR else 1


def _report(options: argparse.Namespace, name: str, model: Path, rows: torch.Tensor) -> float:
    losses = losses_by_position(model, rows)
    old = float(losses[options.length // 2 : options.length - 1].mean())
    new = float(losses[options.length :].mean())
    print(f"{name:8} old positions {old:.3f}, new {new:.3f}: {new / old - 1:+.1%}", flush=True)
    return new / old - 1


def long_rows(store: Path, count: int, length: int) -> torch.Tensor:
    """Returns `count` pieces of `length` tokens from all over the long documents, (count, length); none is the first of
    its document, so that text at all positions is equally hard."""
    opened = TokenStore.open(store)
    pairs = pairwise(opened.offsets.tolist())
    starts = [at for start, end in pairs for at in range(start + length, end - length + 1, length)]
    if not starts:
        raise SystemExit(f"{store}: no document has {2 * length} tokens")
    chosen = starts[:: max(len(starts) // count, 1)][:count]
    return torch.stack([torch.from_numpy(opened.tokens[at : at + length].astype("int64")) for at in chosen])


def losses_by_position(model: Path, rows: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of `model`, read by plain Transformers, at each position of `rows` (N, T): (T - 1,)."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False).eval()
    total = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
    with torch.no_grad():
        for some in rows.split(8):
            logits = loaded(input_ids=some).logits[:, :-1]
            total += torch.nn.functional.cross_entropy(logits.mT, some[:, 1:], reduction="none").double().sum(0)
    return total / len(rows)


def train(
    options: argparse.Namespace,
    run: Path,
    length: int,
    steps: int,
    *,
    scaling: dict[str, Any] | None = None,
    start: dict[str, Any] | None = None,
) -> Path:
    """Trains on rows of `length` into `run`, always the same number of tokens a step. Returns the exported model."""
    raw = {
        "data": {"train": [str(options.store.resolve())], "sequence_length": length},
        "architecture": {
            "type": "llama", "hidden_size": options.hidden_size, "num_hidden_layers": 4,
            "num_attention_heads": options.hidden_size // 32, "intermediate_size": 3 * options.hidden_size,
            "max_position_embeddings": length, "rope_theta": options.rope_theta, "rope_scaling": scaling,
        },
        "objective": {"type": "causal_lm"},
        "optimizer": {"type": options.optimizer, "learning_rate": options.learning_rate},
        "schedule": {"type": "cosine", "warmup_steps": min(20, steps)},
        "precision": "fp32",
        "batch_size": {"-1": max(options.tokens // length, 1)},
        "max_steps": steps,
        "logging_steps": 100,
        "spikes": None,
        "start_from": start,
    }  # fmt: skip
    train_in_this_process(Parameters.from_dict(raw, source="longer_rows"), run)
    export(run, run.with_name(f"{run.name}.model"))
    return run.with_name(f"{run.name}.model")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a token store")
    parser.add_argument("validation", type=Path, help="a token store of other, long documents")
    parser.add_argument("--ways", nargs="+", choices=["none", "linear", "yarn"], default=["none", "linear", "yarn"])
    parser.add_argument("--optimizer", default="adamw", help="its type; default adamw")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--rope-theta", type=float, default=1e4, help="base of the rotary positions; default 10,000")
    for name, value, text in (
        ("length", 64, "tokens of a short row"),
        ("factor", 4, "how many times longer rows become"),
        ("tokens", 2048, "tokens of a step"),
        ("steps", 1500, "steps on short rows"),
        ("more-steps", 200, "steps on long rows"),
        ("hidden-size", 64, "width of the model, a multiple of 32"),
        ("rows", 256, "pieces of long documents that are measured"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text}; default {value}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
