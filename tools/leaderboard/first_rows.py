"""The first two rows of the leaderboard: the same encoder, trained by terakoya and by Transformers' `Trainer`.

    python tools/leaderboard/leaderboard.py enter terakoya --work WORK -- python first_rows.py ours
    python tools/leaderboard/leaderboard.py enter Trainer --work WORK -- python first_rows.py train

terakoya's is what `terakoya init` answers to the text and the hours and `terakoya run` makes of it, with nothing set
but the seed. `Trainer` has the architecture and tokenizer that `init` chose, and the recipe of Transformers' examples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from terakoya.json_settings import read_settings

SHOWCASE = Path(__file__).resolve().parents[1] / "bench/showcase.py"
MARGIN = 0.85
"""The share of the seconds left that training may take by the speed of its first steps: where both cores of a machine
trained, those of the next twenty minutes took 10 to 13 % longer."""
PREPARATION = 180
"""CPU seconds of what comes before and after training: tokenizer, token store, validation, export."""


def main(trainer: str) -> None:
    """Makes the model on one core: `trainer` is "ours" or "train"."""
    os.environ["OMP_NUM_THREADS"] = "1"
    corpus, out, seed, seconds = (os.environ[name] for name in ("TEXT", "OUT", "SEED", "SECONDS"))
    hours = MARGIN * (float(seconds) - PREPARATION) / 3600
    terakoya("init", corpus, "--hours", f"{hours:.3f}", "--yes")
    pipeline = read_settings(Path("pipeline.json"))
    parameters = pipeline["parameters"]
    parameters["seed"] = int(seed)
    if trainer == "ours":
        write("pipeline.json", pipeline | {"export": out})
        terakoya("run", "pipeline.json")
        return
    kind = [f"--{name.replace('_', '-')}={value}" for name, value in pipeline["tokenizer"].items()]
    terakoya("tokenizer", "train", corpus, *kind, "--out", "work/tokenizer")
    terakoya("prepare", corpus, "--tokenizer", "work/tokenizer", "--out", "work/store")
    parameters["data"]["train"], parameters["evaluation"] = ["work/store"], None
    write("parameters.json", parameters)
    left = MARGIN * (float(seconds) - sum(os.times()[:4]))  # of this process and those that it started
    command = [sys.executable, str(SHOWCASE), "train", "parameters.json", "--seconds", str(left), "--out", out]
    subprocess.run(command, check=True)


def write(name: str, settings: dict[str, Any]) -> None:
    """Writes a JSON file."""
    Path(name).write_text(json.dumps(settings), encoding="utf-8")


def terakoya(*words: str) -> None:
    """Runs a command. Raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, "-m", "terakoya", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1])
