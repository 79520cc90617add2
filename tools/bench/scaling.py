"""Tokens per second of the same run on 1, 2 and 4 processes of this machine, and under ZeRO's stages: a table.

    python tools/bench/scaling.py                          a BERT of 4 layers of 256, 16 rows of 128 a step
    python tools/bench/scaling.py --rounds 3 --steps 30 --processes 1 2

Every run trains on the same global batch, started as a user starts it (`terakoya train --processes N`), one thread a
process. Engines take turns, `--rounds` times; a run's rate is the median over its logged steps, the first left out.
More processes than cores share them: their line shows what that costs, not what more machines would bring.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lines

from terakoya.process_pool import available_cores

ENGINES: Mapping[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    **{f"ZeRO-{stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in (0, 1, 2, 3)},
    "fsdp": {"engine": "fsdp"},
}
LOGGED = 5
"""Steps from one logged step to the next."""


def main() -> int:
    """Prints the table."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = lines.drawn(folder / "tokenizer", count=3000, mean_length=60, sequence_length=128, vocabulary_size=8000)
        raw = parameters(data.store(folder / "store").folder, arguments)
        runs = [(engine, count) for engine in arguments.engines for count in arguments.processes]
        rates: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
        for number in range(arguments.rounds):
            for engine, count in runs:
                rates[engine, count].append(rate(raw, engine, count, folder / f"{engine}{count}-{number}"))
                print(".", end="", file=sys.stderr, flush=True)
    print("", file=sys.stderr)
    show(rates, arguments)
    return 0


def rate(raw: Mapping[str, Any], engine: str, processes: int, folder: Path) -> float:
    """Tokens per second of one run."""
    folder.mkdir()
    file = folder / "parameters.json"
    file.write_text(json.dumps({**raw, "parallel": ENGINES[engine]}))
    command = [sys.executable, "-m", "terakoya", "train", str(file), "--out", str(folder / "run")]
    command += ["--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{engine} on {processes} processes:\n{done.stderr[-3000:]}")
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in records if each["kind"] == "step" and each["step"] > LOGGED]
    return statistics.median(each["tokens_per_second"] for each in steps)


def show(rates: Mapping[tuple[str, int], list[float]], arguments: argparse.Namespace) -> None:
    """Prints tokens per second, their range over rounds, and beside one process of ddp."""
    first = (arguments.engines[0], arguments.processes[0])
    base = statistics.median(rates[first])
    counts = arguments.processes
    print(
        f"tokens/s of the same run ({arguments.rows} rows of 128 a step, {arguments.layers} layers of "
        f"{arguments.hidden_size}, float32) on {available_cores()} cores, medians of {arguments.rounds} rounds of "
        f"{arguments.steps} steps, their range, and beside {first[0]} on {first[1]}:\n"
    )
    print("| engine | " + " | ".join(f"{count} process{'es' if count > 1 else ''}" for count in counts) + " |")
    print("|---" * (len(counts) + 1) + "|")
    for engine in arguments.engines:
        cells = []
        for count in counts:
            found = rates[engine, count]
            middle = statistics.median(found)
            cells.append(f"{middle:,.0f} ({min(found):,.0f} to {max(found):,.0f}), {middle / base:.2f} x")
        print(f"| {engine} | " + " | ".join(cells) + " |")


def parameters(store: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The run: a BERT without dropout."""
    hidden = arguments.hidden_size
    return {
        "data": {"train": [str(store)], "sequence_length": 128},
        "architecture": {
            "type": "bert", "hidden_size": hidden, "num_hidden_layers": arguments.layers,
            "num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        "objective": {"type": "masked_lm"},
        "optimizer": {"type": "adamw", "learning_rate": 1e-4},
        "schedule": {"type": "constant"},
        "precision": "fp32",
        "batch_size": {"-1": arguments.rows},
        "max_steps": arguments.steps,
        "logging_steps": LOGGED,
        "checkpoint": {"model": "never", "save_steps": 1_000_000},
    }  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
