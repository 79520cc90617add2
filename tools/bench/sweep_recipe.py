"""Which recipe learns soonest: small encoders trained on one store with one thing changed at a time.

    python tools/bench/sweep_recipe.py --store STORE --work FOLDER [--only NAME ...]

Part of the store's own documents is kept aside to measure on, so that no choice is made on the text of a comparison.
Prints loss, masked accuracy and CPU seconds of each variant; docs/explanation/recipes.md has what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

WIDTH = 128
BERT = {
    "type": "bert", "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 4 * WIDTH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MODERNBERT = {
    "type": "modernbert", "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 8 * WIDTH // 3 // 16 * 16, "local_attention": 16,
}  # fmt: skip
MUON = {"type": "muon", "learning_rate": 1e-2, "weight_decay": 0.1}
RECIPE: dict[str, Any] = {
    "architecture": MODERNBERT,
    "optimizer": MUON,
    "objective": {"type": "masked_lm", "mlm_probability": {"start": 0.3, "end": 0.15}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "bert": {"architecture": BERT},
    "bert, dropout 0.1": {"architecture": {**BERT, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}},
    "window 128": {"architecture": {**MODERNBERT, "local_attention": 128}},
    "window 32": {"architecture": {**MODERNBERT, "local_attention": 32}},
    "window 8": {"architecture": {**MODERNBERT, "local_attention": 8}},
    "adamw 1e-3": {"optimizer": {"type": "adamw", "learning_rate": 1e-3}},
    "adamw 3e-3": {"optimizer": {"type": "adamw", "learning_rate": 3e-3}},
    "muon 5e-3": {"optimizer": {**MUON, "learning_rate": 5e-3}},
    "muon 2e-2": {"optimizer": {**MUON, "learning_rate": 2e-2}},
    "15 % masked": {"objective": {"type": "masked_lm", "mlm_probability": 0.15}},
    "bert, adamw 1e-3, 15 % masked": {
        "architecture": BERT,
        "optimizer": {"type": "adamw", "learning_rate": 1e-3},
        "objective": {"type": "masked_lm", "mlm_probability": 0.15},
    },
}
"""What differs from the recipe, by name."""


def main(argv: list[str] | None = None) -> int:
    """Trains the variants and prints a line for each. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, required=True, help="what `terakoya prepare` wrote, with word starts")
    parser.add_argument("--work", type=Path, required=True, help="the folder for the runs")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    parser.add_argument("--sequence-length", type=int, default=128)
    arguments = parser.parse_args(argv)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        loss, accuracy, seconds = train(name, arguments)
        print(f"{name:32} loss {loss:.3f}  masked accuracy {accuracy:.1%}  {seconds:.0f} CPU s", flush=True)
    return 0


def parameters(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The parameter JSON of a variant."""
    return {
        **RECIPE,
        **VARIANTS[name],
        "data": {
            "train": [{"store": str(arguments.store)}],
            "split": [98, 2],
            "sequence_length": arguments.sequence_length,
        },
        "schedule": {"type": "linear", "warmup_steps": max(1, arguments.steps // 15)},
        "batch_size": {"-1": arguments.batch_size},
        "max_steps": arguments.steps,
        "logging_steps": arguments.steps,
        "checkpoint": {"model": "never"},
        "evaluation": {"steps": arguments.steps, "batches": -(-128 // arguments.batch_size)},
    }


def train(name: str, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Trains a variant. Returns its last validation loss, its masked accuracy and the CPU seconds of the command."""
    file = arguments.work / f"{name.replace(' ', '_').replace('%', 'percent').replace(',', '')}.json"
    raw = parameters(name, arguments)
    raw["architecture"] = {**raw["architecture"], "max_position_embeddings": arguments.sequence_length}
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(file.with_suffix(""))],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = (file.with_suffix("") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [record for record in map(json.loads, lines) if record["kind"] == "validation"][-1]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return last["loss"], last["masked_accuracy"], seconds


if __name__ == "__main__":
    sys.exit(main())
