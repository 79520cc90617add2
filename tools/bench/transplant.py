"""How many tokens a transplanted model needs to be as good as one from scratch, in bits per character.

    python tools/bench/transplant.py CORPUS.jsonl.gz VALIDATION.jsonl.gz

A small GPT is trained with one tokenizer on the first half of the corpus. Then models with another tokenizer train on
the second half: from random weights, and from the GPT with `"vocabulary": "transplant"` and each initializer. Printed
for each seed: the tokens after which a model first has the bits per character that the one from scratch has after each
of `--steps`, between two validations by a straight line. Its learning rate is constant, so that each of these is also
the end of a shorter run. Exits with 1 where the default initializer misses a goal, at the first of `--steps`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.preparation.prepare import prepare
from terakoya.tokenization.train import train_tokenizer
from terakoya.training.setup import train_in_this_process

DEFAULT, PLAIN = "pieces_and_mean", "mean_of_all"
WAYS = (PLAIN, "mean_of_pieces", DEFAULT)
SHARE_OF_SCRATCH, FEWER_THAN_PLAIN = 0.20, 0.15
"""Goals: at most this share of the tokens from scratch, and so many fewer than with the mean of all rows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table. Returns the exit status."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as home:
        needed = measure(options, Path(home))
    met = [_summary(steps, [row[steps] for row in needed]) for steps in options.steps]
    return 0 if met[0] else 1


def _summary(steps: int, rows: Sequence[Mapping[str, float]]) -> bool:
    """Prints what the default initializer needs beside each other way. Returns whether both goals are met."""
    if any(row[DEFAULT] == float("inf") for row in rows):
        print(f"{steps} steps: with a seed {DEFAULT} never reached the bits from scratch; raise --transplant-steps")
        return False
    share = statistics.mean(row[DEFAULT] / row["scratch"] for row in rows)
    less = statistics.mean(1 - row[DEFAULT] / row[PLAIN] for row in rows)
    print(f"{steps} steps: {DEFAULT} needs {share:.0%} of the tokens from scratch, {less:.0%} fewer than {PLAIN}")
    return share <= SHARE_OF_SCRATCH and less >= FEWER_THAN_PLAIN


def measure(options: argparse.Namespace, home: Path) -> list[dict[int, dict[str, float]]]:
    """Trains all models in `home`. Returns for each seed and each of `options.steps` the tokens that each way needs, by
    its name."""
    halves = _split(options.corpus, home, options.documents)
    stores: dict[str, Path] = {}
    for name, text, settings in (
        ("old", halves[0], {"model_type": "unigram", "vocab_size": options.vocab_size}),
        ("new", halves[1], {"model_type": "bpe", "vocab_size": 2 * options.vocab_size}),
    ):
        kind = {"type": "sentencepiece", "byte_fallback": True, "character_coverage": 0.98, **settings}
        train_tokenizer([text], home / name, settings=kind, processes=1)
        stores[name] = home / f"{name}-store"
        prepare([text], tokenizer=home / name, out=stores[name], processes=1)
    prepare([options.validation], tokenizer=home / "new", out=home / "validation", processes=1)
    source = _parameters(options, stores["old"], None, options.source_steps, seed=0)
    train_in_this_process(Parameters.from_dict(source, source="transplant"), home / "source")
    export(home / "source", home / "model")
    result = []
    for seed in range(options.seeds):
        curves = {}
        for way in ("scratch", *WAYS):
            raw = _parameters(options, stores["new"], home / "validation", max(options.steps), seed=seed)
            if way != "scratch":
                raw["max_steps"] = options.transplant_steps
                raw["start_from"] = {"folder": str(home / "model"), "vocabulary": "transplant", "initializer": way}
            run = home / f"{way}-{seed}"
            train_in_this_process(Parameters.from_dict(raw, source="transplant"), run)
            curves[way] = _curve(run)
            print(
                f"seed {seed} {way}: " + " ".join(f"{tokens:,}:{bits:.3f}" for tokens, bits in curves[way]), flush=True
            )
        rows = {}
        for steps in options.steps:
            tokens, goal = curves["scratch"][steps // options.every]
            row = {"scratch": float(tokens), **{way: tokens_to_reach(goal, curves[way]) for way in WAYS}}
            print(f"seed {seed}: {goal:.3f} bits after " + ", ".join(f"{way} {at:,.0f}" for way, at in row.items()))
            rows[steps] = row
        result.append(rows)
    return result


def tokens_to_reach(goal: float, curve: Sequence[tuple[float, float]]) -> float:
    """Returns the tokens (or operations) at which `curve`, (tokens, bits) by validation, first is at `goal`; infinity
    where never."""
    if curve[0][1] <= goal:
        return float(curve[0][0])
    for (before, high), (after, low) in pairwise(curve):
        if low <= goal:
            return before + (after - before) * (high - goal) / (high - low)
    return float("inf")


def _curve(run: Path) -> list[tuple[int, float]]:
    """Tokens and bits per character at each validation."""
    tokens: dict[int, int] = {}
    found: list[tuple[int, float]] = []
    for record in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["kind"] == "step":
            tokens[record["step"]] = record["tokens"]
        elif record["kind"] == "validation":
            found.append((record["step"], record["bits_per_character"]))
    return [(tokens.get(step, 0), bits) for step, bits in found]


def _parameters(
    options: argparse.Namespace, store: Path, validation: Path | None, steps: int, *, seed: int
) -> dict[str, Any]:
    data: dict[str, Any] = {"train": [str(store)], "sequence_length": 128}
    if validation is not None:
        data["validation"] = [str(validation)]
    architecture: Mapping[str, Any] = {
        "type": "gpt2", "hidden_size": options.hidden_size, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    return {
        "data": data,
        "architecture": architecture,
        "objective": {"type": "causal_lm"},
        "optimizer": {"type": "adamw", "learning_rate": 2e-3},
        "schedule": {"type": "constant", "warmup_steps": min(10, steps)},
        "precision": "fp32",
        "batch_size": {"-1": 8},
        "max_steps": steps,
        "evaluation": {"steps": options.every, "batches": 6} if validation is not None else None,
        "logging_steps": 1,
        "seed": seed,
        "spikes": None,
    }


def _split(corpus: Path, home: Path, count: int) -> list[Path]:
    """The first and the second `count` documents of `corpus` as two files."""
    files = [home / "first.jsonl", home / "second.jsonl"]
    with gzip.open(corpus, "rt", encoding="utf-8") as lines:
        for file in files:
            texts = [json.loads(line)["text"] for _, line in zip(range(count), lines, strict=False)]
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return files


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="jsonl.gz")
    parser.add_argument("validation", type=Path, help="jsonl.gz of other documents")
    for name, value, text in (
        ("documents", 150, "documents of each half"),
        ("vocab-size", 2000, "pieces of the first tokenizer; the second has twice as many"),
        ("hidden-size", 64, "width of the models"),
        ("source-steps", 500, "steps of the first model"),
        ("transplant-steps", 100, "steps of each transplanted model"),
        ("every", 5, "steps from one validation to the next"),
        ("seeds", 3, "repetitions with other seeds"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text}; default {value}")
    steps = "steps from scratch, multiples of --every; default 300 500"
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 500], help=steps)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
