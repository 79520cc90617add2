"""How true the hours of `terakoya estimate` are: predicts runs on this machine, takes them, and compares.

    python tools/bench/hours.py [--only NAME ...] [--seconds 40] [--results FILE]

Each of some runs is predicted as `terakoya estimate` does it: by steps that are timed for at most 20 seconds. Then
`terakoya train` takes the run, with validations and a checkpoint, and `metrics.jsonl` says how many seconds there were
from its start to its end. The stores are random tokens. Exits with 1 where a difference is above the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GOAL = 0.15
VOCABULARY = 8000
TOKENS = 400_000
"""Tokens of the store: more than one pass in no run."""


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        preset: whose model, objective and optimizer it has, with `changes`.
        rows, micro_batch, length: of a step, of a micro-step, tokens of a row.
    """

    name: str
    preset: str
    rows: int
    length: int
    micro_batch: int | None = None
    processes: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)


MUON, ADAMW = ({"optimizer": {"type": kind, "learning_rate": 1e-3}} for kind in ("muon", "adamw"))
CASES = (
    Case("BERT, 4 x 256", "tiny_bert", 32, 128),
    Case("BERT, 12 x 256", "bert_small", 16, 128),
    Case("BERT-base", "bert_base", 4, 128),
    Case("BERT, 4 x 256, Muon, two processes", "tiny_bert", 32, 128, 8, processes=2, changes=MUON),
    Case("ModernBERT, 3 x 128, Muon", "tiny_modernbert", 16, 128),
    Case("ModernBERT, 6 x 256, AdamW", "bert_ja_small", 16, 128, changes=ADAMW),
    Case("ELECTRA, 4 x 256", "tiny_electra", 32, 128),
    Case("ELECTRA-small", "electra_small", 16, 128),
    Case("GPT-2, 4 x 256, two processes", "tiny_gpt2", 16, 256, processes=2),
    Case("GPT-2 125M", "gpt2_125m", 2, 256),
    Case("Llama, 4 x 256, Muon", "tiny_llama", 16, 256, 4, changes=MUON),
)
TOY = (
    Case("BERT", "tiny_bert", 4, 16, changes={"architecture": {"hidden_size": 16, "num_hidden_layers": 2}}),
    Case("GPT-2", "tiny_gpt2", 4, 16, processes=2, changes={"architecture": {"hidden_size": 16}}),
)


def main() -> int:
    """Prints a line for each run. Returns the exit status."""
    arguments = _arguments()
    cases = [each for each in (TOY if arguments.toy else CASES) if not arguments.only or each.name in arguments.only]
    print("| run | processes | predicted from | steps | predicted, s | real, s | difference |")
    print("|---|--:|---|--:|--:|--:|--:|")
    worst = 0.0
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
            compared = compare(case, Path(folder), seconds=arguments.seconds)
        if compared is None:
            print(f"| {case.name} | {case.processes} | nothing: the steps took too long | | | | |", flush=True)
            continue
        worst = max(worst, abs(compared["difference"]))
        print(
            f"| {case.name} | {case.processes} | {compared['from']} | {compared['steps']:,} | "
            f"{compared['predicted']:.1f} | {compared['real']:.1f} | {compared['difference']:+.1%} |", flush=True,
        )  # fmt: skip
        if arguments.results is not None:
            with arguments.results.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"name": case.name, "processes": case.processes, **compared}) + "\n")
    print(f"largest difference {worst:.1%}, goal {GOAL:.0%}")
    return int(worst > GOAL and not arguments.toy)


def compare(case: Case, folder: Path, *, seconds: float) -> dict[str, Any] | None:
    """Returns the seconds that are predicted for a run of `case`, about `seconds` of them, and those that it takes;
    None where the machine is too busy, or too slow, to predict any."""
    from terakoya.config.parameters import Parameters
    from terakoya_planning.estimate import estimate
    from terakoya_planning.measuring import measure_here

    write_stores(folder)
    began = time.perf_counter()
    steps = 100
    for _ in range(2):  # the first prediction says how many steps there are in so many seconds
        raw = parameters(case, folder, steps)
        said = estimate(
            Parameters.from_dict(raw, source=case.name), processes=case.processes, device="cpu",
            measure_speed=measure_here,
        )  # fmt: skip
        if said.speed is None or said.hours is None:
            return None
        asked, steps = time.perf_counter() - began, max(8, round(seconds / said.speed.high))
    file, run = folder / "run.json", folder / "run"
    file.write_text(json.dumps(raw))
    command = ["train", str(file), "--out", str(run), "--processes", str(case.processes)]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "terakoya", *command], check=True, stderr=subprocess.DEVNULL)
    whole = time.perf_counter() - began
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    start, end = (next(each for each in lines if each["kind"] == kind) for kind in ("start", "finished"))
    real, predicted = end["time"] - start["time"], 3600 * said.hours[1]
    return {
        "from": said.speed.said.partition("in steps of ")[2], "steps": said.steps, "predicted": predicted, "real": real,
        "difference": predicted / real - 1, "whole_command": whole, "asking": asked,
    }  # fmt: skip


def parameters(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """Returns the parameters of a run of `case`."""
    from terakoya.config.presets import presets_folder

    raw = json.loads((presets_folder() / f"{case.preset}.json").read_text())
    for key, value in case.changes.items():
        raw[key] = {**raw[key], **value} if key == "architecture" else value
    return {
        **raw,
        "data": {"train": [str(folder / "store")], "validation": [str(folder / "validation")],
                 "sequence_length": case.length},
        "schedule": {"type": "constant"},
        "batch_size": {"-1": case.rows},
        "micro_batch_size": case.micro_batch,
        "max_steps": steps,
        "precision": "fp32",
        "checkpoint": {"save_steps": steps},
        "evaluation": {"steps": max(1, steps // 4), "batches": 2},
        "trackers": [],
    }  # fmt: skip


def write_stores(folder: Path) -> None:
    """Writes stores of random tokens, in documents of 20 to 400."""
    from terakoya.components.vocabulary import Vocabulary
    from terakoya.store.writer import write_store

    vocabulary = Vocabulary(size=VOCABULARY, pad=0, unk=1, cls=2, sep=3, mask=4, bos=5, eos=6, special=tuple(range(8)))
    random = np.random.default_rng(7)
    for name, tokens in (("store", TOKENS), ("validation", TOKENS // 10)):
        lengths = random.integers(20, 400, tokens // 210)
        documents = [[random.integers(8, VOCABULARY, each)] for each in lengths]
        words = [[np.arange(len(each)) % 2 == 0 for each in document] for document in documents]
        write_store(folder / name, documents, vocabulary=vocabulary, unit="document", word_starts=words)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), help="names of runs; default: all")
    parser.add_argument("--seconds", type=float, default=40, help="how long each run should take")
    parser.add_argument("--results", type=Path, help="a file to which each run's numbers are added, as JSON")
    parser.add_argument("--toy", action="store_true", help="two tiny runs, whatever the difference")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
