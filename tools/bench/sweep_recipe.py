"""Which recipe learns soonest: small models trained with one thing changed at a time, in pairs of the same seed.

    python tools/bench/sweep_recipe.py --store STORE --work FOLDER [--family gpt] [--width 256] [--only NAME ...]

Part of the store's own documents is kept aside to measure on, so that no choice is made on the text of a comparison.
All changes see the same number of tokens. Trains with several processes, compares with `terakoya compare`, and prints
differences from the recipe with their intervals; docs/explanation/recipes.md has what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HEAD_WIDTH = 32
ROWS = 512
"""Held-out rows that are measured on."""
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"architecture": {"type": "bert", "num_attention_heads": 4, **NO_DROPOUT}}
GPT2 = {"architecture": {"type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
RECIPES: dict[str, dict[str, Any]] = {
    "bert": {
        "architecture": {"type": "modernbert", "local_attention": 16},
        "optimizer": {"type": "muon", "learning_rate": 1e-2, "weight_decay": 0.1},
        "objective": {"type": "masked_lm", "mlm_probability": {"start": 0.3, "end": 0.15}},
    },
    "gpt": {
        "architecture": {"type": "llama", "tie_word_embeddings": True},
        "optimizer": {"type": "muon", "learning_rate": 1e-2, "weight_decay": 0.1},
        "objective": {"type": "causal_lm"},
    },
}
"""What learns soonest, by family."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon 5e-3": {"learning_rate": 5e-3},
    "muon 2e-2": {"learning_rate": 2e-2},
    "embeddings 1/4": {"embedding_factor": 0.25},
    "embeddings x 2": {"embedding_factor": 2.0},
    "embeddings x 4": {"embedding_factor": 4.0},
    "norms 1/4": {"norm_factor": 0.25},
    "norms 1/10": {"norm_factor": 0.1},
    "NorMuon": {"neuron_beta": 0.95},
    "cautious weight decay": {"cautious_weight_decay": True},
    "weight decay 0.03": {"weight_decay": 0.03},
    "weight decay 0.3": {"weight_decay": 0.3},
    "momentum 0.9": {"momentum": 0.9},
    "betas 0.8, 0.95": {"betas": [0.8, 0.95]},
    "quick": {"norm_factor": 0.25, "momentum": 0.9, "betas": [0.8, 0.95]},
}
"""What differs in Muon's settings, by name."""
QUICK = {"architecture": {"initializer_range": 0.1}, "optimizer": OPTIMIZERS["quick"]}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {
        "bert": BERT,
        "window 128": {"architecture": {"local_attention": 128}},
        "window 32": {"architecture": {"local_attention": 32}},
        "window 8": {"architecture": {"local_attention": 8}},
        "quick, initial 0.1": QUICK,
        "15 % masked": {"objective": {"mlm_probability": 0.15}},
        "40 to 15 % masked": {"objective": {"mlm_probability": {"start": 0.4, "end": 0.15}}},
    },
    "gpt": {"gpt2": GPT2, "initial 0.1": {"architecture": {"initializer_range": 0.1}}},
}
"""What differs in model and masks, by family and name."""


def variants(family: str, steps: int, rows: int, length: int) -> dict[str, dict[str, Any]]:
    """Returns what differs from the recipe, by name, in `steps` steps of `rows` rows of `length`. All variants see as
    many tokens."""
    warm_up, quarter, half = max(1, steps // 15), steps // 4, steps // 2
    narrow_first = [{"steps": half, "architecture": {"local_attention": 8}}, {"steps": steps - half}]
    return {
        "adamw 1e-3": {"optimizer": {"type": "adamw", "learning_rate": 1e-3}},
        "adamw 3e-3": {"optimizer": {"type": "adamw", "learning_rate": 3e-3}},
        "cosine": {"schedule": {"type": "cosine", "warmup_steps": warm_up}},
        **{
            f"decay in the last {name}": {"schedule": {"type": "warmup_stable_decay", "warmup_steps": warm_up, **decay}}
            for name, decay in {
                "fifth": {"decay_ratio": 0.2},
                "half": {"decay_ratio": 0.5, "decay_type": "linear"},
                "half, 1-sqrt": {"decay_ratio": 0.5, "decay_type": "1-sqrt"},
            }.items()
        },
        "average of the last steps": {"events": {"ema": {"decay": 0.98}}},
        "twice the rows": {
            "batch_size": {"-1": 2 * rows},
            "max_steps": steps // 2,
            "schedule": {"warmup_steps": max(1, steps // 30)},
        },
        "half the rows": {
            "batch_size": {"-1": rows // 2},
            "max_steps": 2 * steps,
            "schedule": {"warmup_steps": 2 * warm_up},
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
        **{name: {"optimizer": settings} for name, settings in OPTIMIZERS.items()},
        **MODELS[family],
        **({"quick, initial 0.1, window 8 first": {**QUICK, "phases": narrow_first}} if family == "bert" else {}),
    }


def parameters(variant: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the parameter JSON of a variant: what differs replaces settings of a section, or a section of another
    type."""
    rows, length, width = arguments.batch_size, arguments.sequence_length, arguments.width
    raw: dict[str, Any] = {
        **RECIPES[arguments.family],
        "data": {"train": [{"store": str(arguments.store.resolve())}], "split": [98, 2], "sequence_length": length},
        "schedule": {"type": "linear", "warmup_steps": max(1, arguments.steps // 15)},
        "batch_size": {"-1": rows},
        "max_steps": arguments.steps,
        "checkpoint": {"keep": 2, "save_steps": arguments.steps},
    }
    for section, change in variant.items():
        kept = raw.get(section, {})
        is_whole = not isinstance(change, dict) or section == "batch_size" or "type" in change
        raw[section] = change if is_whole else {**kept, **change}
    raw["architecture"] = {
        "hidden_size": width, "num_hidden_layers": arguments.layers, "num_attention_heads": width // HEAD_WIDTH,
        "max_position_embeddings": length, **raw["architecture"],
    }  # fmt: skip
    if (kind := raw["architecture"]["type"]) != "gpt2":  # which has 4 times its width by itself
        raw["architecture"]["intermediate_size"] = 4 * width if kind == "bert" else 8 * width // 3 // 16 * 16
    raw["evaluation"] = {"steps": raw["max_steps"], "batches": 1}
    raw["logging_steps"] = max(1, raw["max_steps"] // 20)
    return raw


def main(argv: list[str] | None = None) -> int:
    """Trains the variants and prints a line for each. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, required=True, help="what `terakoya prepare` wrote, with word starts")
    parser.add_argument("--work", type=Path, required=True, help="the folder for the runs; what is trained is kept")
    parser.add_argument("--family", choices=list(RECIPES), default="bert")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants by name; default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes that train, of one thread each")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEAD_WIDTH}")
    parser.add_argument("--layers", type=int, default=3)
    arguments = parser.parse_args(argv)
    known = variants(arguments.family, arguments.steps, arguments.batch_size, arguments.sequence_length)
    names = arguments.only or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"--only: {', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, variant in {"recipe": {}, **{name: known[name] for name in names}}.items():
        files[name] = arguments.work / f"{re.sub(r'[^a-z0-9.-]+', '_', name.lower())}.json"
        files[name].write_text(json.dumps(parameters(variant, arguments), indent=2) + "\n", encoding="utf-8")
    runs = [(file, seed) for seed in range(1, arguments.seeds + 1) for file in files.values()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda run: train(*run, arguments.work), runs))
    compared = ["compare", *map(str, files.values()), "--seeds", str(arguments.seeds), "--limit", str(ROWS)]
    compared += ["--out", str(arguments.work)]
    found = json.loads(terakoya([*compared, "--json"]))["differences"]
    paired = [each for each in found if each["method"] == "paired t"]
    recipes = {file.stem: name for name, file in files.items()}
    first = {each["score"]: each["value_a"] for each in paired}
    print("| Change | Loss | 95 % interval | p | Accuracy |\n|---|---:|---:|---:|---:|")
    print(f"| the recipe | {first.pop('loss'):.3f} | | | {next(iter(first.values())):.1%} |")
    for name in recipes:
        scores = {each["score"]: each for each in paired if each["b"] == name}
        if scores:
            loss = scores.pop("loss")
            interval = " to ".join(f"{bound:+.3f}" for bound in loss["interval"] or ())
            accuracy = next(iter(scores.values()))["value_b"]
            print(
                f"| {recipes[name]} | {loss['difference']:+.3f} | {interval} | {loss['p'] or 1:.3f} | {accuracy:.1%} |"
            )
    return 0


def train(file: Path, seed: int, work: Path) -> None:
    """Trains a variant where `terakoya compare` looks for its run, unless it is trained."""
    terakoya(["train", str(file), "--set", f"seed={seed}", "--out", str(work / file.stem / f"seed-{seed}")])


def terakoya(words: Sequence[str]) -> str:
    """Runs a command with one thread and returns what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "terakoya", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


if __name__ == "__main__":
    sys.exit(main())
