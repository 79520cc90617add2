"""How many floating point operations a grown model needs to be as good as one from scratch.

    python tools/bench/growth.py STORE VALIDATION_STORE --architecture gpt2

A small model is trained; larger ones start from it (`"start_from": {"grow": ...}`) in each of `--ways`, and one of the
same size starts from random weights. Printed for each seed: the operations after which a grown model first has the
validation loss that the one from scratch has after each of `--steps`, between two validations by a straight line, as a
share of those of the run from scratch. The training of the small model is counted. The learning rate is constant, so
that each step is also the end of a shorter run. Exits with 1 where the best way needs more than the goal, at the last
of `--steps`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from transplant import tokens_to_reach

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.training.setup import train_in_this_process

GOAL = 0.70
OBJECTIVES = {"gpt2": "causal_lm", "llama": "causal_lm", "bert": "masked_lm", "modernbert": "masked_lm"}
Curve = list[tuple[float, float]]
"""Operations and loss at each validation."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table. Returns the exit status."""
    options = _options(arguments)
    shares: dict[str, dict[int, list[float]]] = {way: {at: [] for at in options.steps} for way in options.ways}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            home = Path(temporary) / str(seed)
            spent, small = train(options, home / "small", options.small_steps, seed, layers=options.small_layers)
            export(home / "small", home / "model")
            print(f"seed {seed}: the small model ends at {small[-1][1]:.3f}", flush=True)
            _, scratch = train(options, home / "scratch", max(options.steps), seed)
            found = ", ".join(f"{at} steps {scratch[at // options.every][1]:.3f}" for at in options.steps)
            print(
                f"seed {seed} from scratch: {found}; the small one took {spent / scratch[-1][0]:.0%} of its operations"
            )
            for way in options.ways:
                start = {"folder": str(home / "model"), "grow": way}
                _, curve = train(options, home / way, options.grown_steps, seed, start_from=start)
                curve = [(spent + operations, loss) for operations, loss in curve]
                for at in options.steps:
                    operations, goal = scratch[at // options.every]
                    shares[way][at].append(tokens_to_reach(goal, curve) / operations)
                found = ", ".join(f"{at} steps {shares[way][at][-1]:.0%}" for at in options.steps)
                print(f"seed {seed} {way}: begins at {curve[0][1]:.3f}; {found}", flush=True)
    for way, found in shares.items():
        print(f"{way}: " + ", ".join(f"{at} steps {statistics.mean(each):.0%}" for at, each in found.items()))
    return 0 if min(statistics.mean(found[max(options.steps)]) for found in shares.values()) <= GOAL else 1


def train(
    options: argparse.Namespace, run: Path, steps: int, seed: int, *, layers: int | None = None, start_from: Any = None
) -> tuple[float, Curve]:
    """Trains one model into `run`. Returns its floating point operations and its curve."""
    length, width = 128, options.hidden_size
    architecture: dict[str, Any] = {
        "type": options.architecture, "hidden_size": width, "num_hidden_layers": layers or options.layers,
        "num_attention_heads": width // 32, "max_position_embeddings": length,
    }  # fmt: skip
    if options.architecture != "gpt2":
        architecture["intermediate_size"] = 4 * width if options.architecture == "bert" else 8 * width // 3
    if options.architecture == "modernbert":
        architecture["local_attention"] = 16
    for name in DROPOUTS.get(options.architecture, ()):
        architecture[name] = 0.0
    raw = {
        "data": {
            "train": [str(options.store.resolve())],
            "validation": [str(options.validation.resolve())],
            "sequence_length": length,
        },
        "architecture": architecture,
        "objective": {"type": OBJECTIVES[options.architecture]},
        "optimizer": {"type": options.optimizer, "learning_rate": options.learning_rate},
        "schedule": {"type": "constant", "warmup_steps": min(20, steps)},
        "precision": "fp32",
        "batch_size": {"-1": 8},
        "max_steps": steps,
        "evaluation": {"steps": options.every, "batches": 8},
        "logging_steps": 1,
        "seed": seed,
        "spikes": None,
        "start_from": start_from,
    }
    train_in_this_process(Parameters.from_dict(raw, source="growth"), run)
    tokens, curve, per_token = {0: 0}, [], 0.0
    for record in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["kind"] == "start":
            per_token = record["flops_per_token"]
        elif record["kind"] == "step":
            tokens[record["step"]] = record["tokens"]
        elif record["kind"] == "validation":
            curve.append((per_token * tokens[record["step"]], record["loss"]))
    return per_token * max(tokens.values()), curve


DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
"""Settings that are 0 here: small runs see each row once."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a token store")
    parser.add_argument("validation", type=Path, help="a token store of other documents")
    parser.add_argument("--architecture", choices=sorted(OBJECTIVES), default="gpt2")
    parser.add_argument("--ways", nargs="+", choices=["stack", "identity"], default=["stack", "identity"])
    parser.add_argument("--steps", type=int, nargs="+", default=[800, 1600], help="from scratch, multiples of --every")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    for name, value, text in (
        ("hidden-size", 64, "width of the models, a multiple of 32"),
        ("layers", 8, "blocks of the larger model"),
        ("small-layers", 2, "blocks of the small model"),
        ("small-steps", 800, "steps of the small model"),
        ("grown-steps", 1200, "steps of each grown model"),
        ("every", 50, "steps from one validation to the next"),
        ("seeds", 3, "repetitions with other seeds"),
        ("first-seed", 0, "the first of these seeds, to divide them among processes"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text}; default {value}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
