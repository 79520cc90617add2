"""Which recipe learns soonest: small models trained on one store with one thing changed at a time.

    python tools/bench/sweep_recipe.py --store STORE --work FOLDER [--family gpt] [--only NAME ...]

Part of the store's own documents is kept aside to measure on, so that no choice is made on the text of a comparison.
Prints loss, accuracy and CPU seconds of each variant, which all see the same number of tokens;
docs/explanation/recipes.md has what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
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
LLAMA = {
    "type": "llama", "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 8 * WIDTH // 3 // 16 * 16, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {
    "type": "gpt2", "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
ADAMW = {"type": "adamw", "learning_rate": 3e-3}
RECIPES: dict[str, dict[str, Any]] = {
    "bert": {
        "architecture": MODERNBERT,
        "optimizer": MUON,
        "objective": {"type": "masked_lm", "mlm_probability": {"start": 0.3, "end": 0.15}},
    },
    "gpt": {"architecture": LLAMA, "optimizer": MUON, "objective": {"type": "causal_lm"}},
}
"""What learns soonest, by family."""
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {
        "bert": {"architecture": BERT},
        "bert, dropout 0.1": {
            "architecture": {**BERT, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
        },
        "window 128": {"architecture": {**MODERNBERT, "local_attention": 128}},
        "window 32": {"architecture": {**MODERNBERT, "local_attention": 32}},
        "window 8": {"architecture": {**MODERNBERT, "local_attention": 8}},
        "15 % masked": {"objective": {"type": "masked_lm", "mlm_probability": 0.15}},
        "bert, adamw 1e-3, 15 % masked": {
            "architecture": BERT,
            "optimizer": {"type": "adamw", "learning_rate": 1e-3},
            "objective": {"type": "masked_lm", "mlm_probability": 0.15},
        },
    },
    "gpt": {
        "gpt2": {"architecture": GPT2},
        "gpt2, adamw 3e-3": {"architecture": GPT2, "optimizer": ADAMW},
        "gpt2, adamw 3e-3, dropout 0.1": {"architecture": {**GPT2, **DROPOUT}, "optimizer": ADAMW},
    },
}
"""What differs from the recipe in model and masks, by family and name."""


def variants(family: str, steps: int, rows: int, length: int) -> dict[str, dict[str, Any]]:
    """Returns what differs from the recipe, by name, in `steps` steps of `rows` rows of `length`. All variants see as
    many tokens."""
    warm_up = max(1, steps // 15)
    quarter = steps // 4
    return {
        "recipe": {},
        "muon 5e-3": {"optimizer": {**MUON, "learning_rate": 5e-3}},
        "muon 2e-2": {"optimizer": {**MUON, "learning_rate": 2e-2}},
        "adamw 1e-3": {"optimizer": {"type": "adamw", "learning_rate": 1e-3}},
        "adamw 3e-3": {"optimizer": ADAMW},
        "cosine": {"schedule": {"type": "cosine", "warmup_steps": warm_up}},
        "decay in the last fifth": {
            "schedule": {"type": "warmup_stable_decay", "warmup_steps": warm_up, "decay_ratio": 0.2}
        },
        "twice the rows": {
            "batch_size": {"-1": 2 * rows},
            "max_steps": steps // 2,
            "schedule": {"type": "linear", "warmup_steps": max(1, steps // 30)},
        },
        "half the rows first": {
            "max_steps": steps + quarter,
            "phases": [{"steps": 2 * quarter, "batch_size": {"-1": rows // 2}}, {"steps": steps - quarter}],
        },
        "half the length first": {
            "phases": [
                {"steps": quarter, "batch_size": {"-1": 2 * rows}, "data": {"sequence_length": length // 2}},
                {"steps": steps - quarter},
            ],
        },
        **MODELS[family],
    }


def main(argv: list[str] | None = None) -> int:
    """Trains the variants and prints a line for each. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, required=True, help="what `terakoya prepare` wrote, with word starts")
    parser.add_argument("--work", type=Path, required=True, help="the folder for the runs")
    parser.add_argument("--family", choices=list(RECIPES), default="bert")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants by name; default all")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    parser.add_argument("--sequence-length", type=int, default=128)
    arguments = parser.parse_args(argv)
    known = variants(arguments.family, arguments.steps, arguments.batch_size, arguments.sequence_length)
    names = arguments.only or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"--only: {', '.join(sorted(unknown))}: expected one of {', '.join(known)}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in names:
        loss, accuracy, seconds = train(name, parameters(known[name], arguments), arguments.work)
        print(f"{name:32} loss {loss:.3f}  accuracy {accuracy:.1%}  {seconds:.0f} CPU s", flush=True)
    return 0


def parameters(variant: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the parameter JSON of a variant."""
    raw = {
        **RECIPES[arguments.family],
        "data": {
            "train": [{"store": str(arguments.store)}],
            "split": [98, 2],
            "sequence_length": arguments.sequence_length,
        },
        "schedule": {"type": "linear", "warmup_steps": max(1, arguments.steps // 15)},
        "batch_size": {"-1": arguments.batch_size},
        "max_steps": arguments.steps,
        "checkpoint": {"model": "never"},
        **variant,
    }
    raw["architecture"] = {**raw["architecture"], "max_position_embeddings": arguments.sequence_length}
    raw["evaluation"] = {"steps": raw["max_steps"], "batches": -(-128 // raw["batch_size"]["-1"])}
    raw["logging_steps"] = raw["max_steps"]
    return raw


def train(name: str, raw: Mapping[str, Any], work: Path) -> tuple[float, float, float]:
    """Trains a variant. Returns its last validation loss, its accuracy and the CPU seconds of the command."""
    file = work / f"{name.replace(' ', '_').replace('%', 'percent').replace(',', '')}.json"
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(file.with_suffix(""))],
        check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = (file.with_suffix("") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [record for record in map(json.loads, lines) if record["kind"] == "validation"][-1]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return last["loss"], last.get("masked_accuracy", last.get("token_accuracy")), seconds


if __name__ == "__main__":
    sys.exit(main())
