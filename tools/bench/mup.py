"""Whether the best learning rate of a narrow model is the best of a wide one, with `mup` and without.

    python tools/bench/mup.py --store STORE --work FOLDER --architectures llama bert

Trains models of two blocks at two widths, of which the wide one is the base width, where `mup` changes nothing. The
learning rate is changed by factors of two, from one beside the best so far to the next, until both neighbours of the
best one are worse. Part of the store's own documents is kept aside to measure on. Prints the validation loss of each
run and the best learning rates. Exits with 1 where, with `mup`, that of the wide model is more than a factor of two
from that of the narrow one. A run that is finished in FOLDER is not trained again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from terakoya.config.parameters import Parameters
from terakoya.training.setup import train_in_this_process
from terakoya_contract import toy

FACTOR = 2.0
"""The most that the best learning rates of two widths may differ by."""
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MASKED: dict[str, Any] = {"type": "masked_lm"}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bert": (NO_DROPOUT, MASKED),
    "electra": (NO_DROPOUT, {"type": "replaced_token", "generator_size": "1/2"}),
    "llama": ({}, {"type": "causal_lm", "append_eos": False}),
    "modernbert": ({"local_attention": 32}, MASKED),
}
"""What differs in architecture and objective."""
Losses = dict[int, float]
"""Validation losses by the binary logarithm of the learning rate."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table. Returns the exit status."""
    options = _options(arguments)
    logging.getLogger("terakoya").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary:
        if options.tiny:
            options.store, options.work = toy.make_store(Path(temporary)).folder, Path(temporary) / "runs"
        found = [compare(name, options) for name in options.architectures]
    return 0 if options.tiny or all(factor <= FACTOR for factor in found) else 1


def compare(name: str, options: argparse.Namespace) -> float:
    """Prints the best learning rates of one architecture. Returns the factor between those of both widths with `mup`,
    at least 1."""
    narrow, wide = options.widths
    start = round(math.log2(options.learning_rate))
    best = {}
    for kind, width in (("", wide), (", with mup", narrow), (", without mup", narrow)):
        losses = search(partial(train, name, width, "with" in kind.split(), options), start, options.most)
        best[kind] = start = min(losses, key=lambda rate: losses[rate])
        tried = ", ".join(f"{2.0**rate:.2g}: {losses[rate]:.3f}" for rate in sorted(losses))
        print(f"{name}, width {width}{kind}: best {2.0**start:.2g}; {tried}", flush=True)
    factors = {kind: 2.0 ** abs(best[kind] - best[""]) for kind in best if kind}
    moved = " and ".join(f"{factor:g}{kind.removeprefix(',')}" for kind, factor in factors.items())
    print(f"{name}: between widths {narrow} and {wide} the best learning rate moves by a factor of {moved}", flush=True)
    return factors[", with mup"]


def search(loss: Callable[[int], float], start: int, most: int) -> Losses:
    """Returns the losses of the learning rates that were tried, of which the lowest has two neighbours unless `most`
    were tried."""
    losses = {start: loss(start)}
    while len(losses) < most:
        best = min(losses, key=lambda rate: losses[rate])
        missing = [rate for rate in (best - 1, best + 1) if rate not in losses]
        if not missing:
            break
        losses[missing[0]] = loss(missing[0])
    return losses


def train(name: str, width: int, mup: bool, options: argparse.Namespace, rate: int) -> float:
    """Trains a model with the learning rate 2^`rate` unless its run is finished. Returns its last validation loss;
    infinity where it is not finite."""
    learning_rate = 2.0**rate
    run: Path = options.work / f"{name}_{width}_{'mup' if mup else 'standard'}_{learning_rate:.2g}"
    if not (run / "checkpoints" / f"step-{options.steps:08d}").exists():
        parameters = Parameters.from_dict(settings(name, width, learning_rate, mup, options), source="mup")
        with contextlib.redirect_stderr(io.StringIO()):
            train_in_this_process(parameters, run)
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    last = [record["loss"] for record in lines if record["kind"] == "validation"][-1]
    return last if math.isfinite(last) else math.inf


def settings(name: str, width: int, learning_rate: float, mup: bool, options: argparse.Namespace) -> dict[str, Any]:
    """The parameter JSON of a run. A head has `--head-size` dimensions at every width."""
    further, objective = FAMILIES[name]
    gated = name in ("llama", "modernbert")
    architecture = {
        "type": name, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": width // options.head_size,
        "intermediate_size": 5 * width // 2 if gated else 4 * width,
        "max_position_embeddings": options.sequence_length, **further,
    }  # fmt: skip
    if name == "electra":
        architecture["embedding_size"] = width
    return {
        "data": {"train": [str(options.store)], "split": [95, 5], "sequence_length": options.sequence_length},
        "architecture": architecture,
        "objective": objective,
        "optimizer": {"type": "adamw", "learning_rate": learning_rate, "betas": [0.9, 0.98], "weight_decay": 0.01},
        "mup": {"base_width": options.widths[1]} if mup else None,
        "schedule": {"type": "linear", "warmup_steps": max(1, options.steps // 10)},
        "precision": "fp32",
        "batch_size": {"-1": options.batch_size},
        "max_steps": options.steps,
        "evaluation": {"steps": options.steps, "batches": options.validation_rows // options.batch_size},
        "checkpoint": {"model": "never"},
        "logging_steps": options.steps,
        "spikes": None,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="a token store")
    parser.add_argument("--work", type=Path, help="the folder for the runs")
    parser.add_argument("--architectures", nargs="+", choices=sorted(FAMILIES), default=sorted(FAMILIES))
    parser.add_argument("--widths", nargs=2, type=int, default=[128, 512], help="a narrow one, and the base width")
    parser.add_argument("--learning-rate", type=float, default=2.0**-10, help="the first to try, a power of 2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a step")
    parser.add_argument("--validation-rows", type=int, default=256)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--head-size", type=int, default=64, help="dimensions of a head")
    parser.add_argument("--most", type=int, default=9, help="the most learning rates to try")
    parser.add_argument("--tiny", action="store_true", help="a toy store and toy sizes: shows that it works")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.widths, options.head_size, options.steps = [16, 32], 8, 2
        options.sequence_length, options.batch_size, options.most = 32, 4, 2
    elif options.store is None or options.work is None:
        parser.error("--store and --work are needed without --tiny")
    return options


if __name__ == "__main__":
    sys.exit(main())
