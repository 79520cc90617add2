"""Which size learns most in a given time: runs of each preset as `terakoya init` writes them, measured on one text.

    python tools/bench/sizes.py --store S --validation V --work FOLDER [--presets NAME ...] [--minutes 4 8 16 32]

Each run is what `init` chooses for its preset, the store and so many minutes of one core of this machine. Prints the
loss of the validation store, the CPU minutes that the run took, its tokens for each parameter outside the embeddings,
and the loss, but for a constant, by which `terakoya_planning.choosing` compares sizes. What is trained is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from terakoya.config.presets import presets_folder
from terakoya.json_settings import read_settings
from terakoya.store.token_store import TokenStore
from terakoya_planning.choosing import Candidate, Recipe, choose, expected_loss, find_machine
from terakoya_planning.measuring import measure_here

PRESETS = ("tiny_modernbert", "bert_ja_small")
VALIDATED = 131_072
"""Tokens of the validation store that are read."""


def main(argv: list[str] | None = None) -> int:
    """Trains the runs and prints a line for each. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True, help="a store of other documents")
    parser.add_argument("--work", type=Path, required=True, help="the folder for the runs")
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--minutes", nargs="+", type=float, default=(4, 8, 16, 32), help="of one core")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes that train, of one thread each")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    runs = [chosen(preset, minutes, arguments) for minutes in arguments.minutes for preset in arguments.presets]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(train, [file for file, _ in runs]))
    print("| preset | minutes | tokens for each parameter | steps | loss | accuracy | expected |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for file, body in runs:
        raw = json.loads(file.read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (file.with_suffix("") / "metrics.jsonl").read_text().splitlines()]
        seen = [each for each in lines if each["kind"] == "validation"][-1]
        tokens = raw["max_steps"] * sum(raw["batch_size"].values()) * raw["data"]["sequence_length"]
        minutes = float(file.with_suffix(".seconds").read_text()) / 60
        print(
            f"| {file.stem.rpartition('-')[0]} | {minutes:.1f} | {tokens / body:.1f} | {raw['max_steps']:,} | "
            f"{seen['mlm_loss']:.3f} | {seen['masked_accuracy']:.1%} | {expected_loss(body, tokens):.3f} |"
        )
    return 0


def chosen(preset: str, minutes: float, arguments: argparse.Namespace) -> tuple[Path, int]:
    """Returns the file of the run that `init` chooses for `preset` and so many minutes, and the parameters of its model
    outside the embeddings."""
    facts, machine = TokenStore.open(arguments.store).facts, find_machine(None, None, measure=measure_here)
    vocabulary = facts.vocabulary.size
    raw = read_settings(presets_folder() / f"{preset}.json")
    body = Candidate.of(preset, raw, vocabulary, machine).body
    file: Path = arguments.work / f"{preset}-{minutes:g}.json"
    if not file.exists():
        choice = choose(
            tokens=facts.tokens, vocabulary=vocabulary, recipe=Recipe((preset,)), goal="model", machine=machine,
            hours=minutes / 60, held_out=1,  # the time is for steps
        )  # fmt: skip
        stores = {"train": [str(arguments.store.resolve())], "validation": [str(arguments.validation.resolve())]}
        made = {**choice.parameters, "seed": arguments.seed, "trackers": []}
        made["data"] = {**made["data"], **stores}
        step = choice.trained_tokens // choice.steps
        made["evaluation"] = {"steps": choice.steps, "batches": -(-VALIDATED // step)}
        file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return file, body


def train(file: Path) -> None:
    """Trains the run beside `file` with one thread, unless it is trained, and keeps its CPU seconds."""
    kept = file.with_suffix(".seconds")
    if not kept.exists():
        command = [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(file.with_suffix(""))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise subprocess.CalledProcessError(process.returncode, command)
        kept.write_text(str(usage.ru_utime + usage.ru_stime))


if __name__ == "__main__":
    sys.exit(main())
