"""The first two rows of the leaderboard: the same encoder, trained by terakoya and by Transformers' `Trainer`.

    python tools/leaderboard/leaderboard.py enter terakoya --work WORK -- python first_rows.py ours
    python tools/leaderboard/leaderboard.py enter Trainer --work WORK -- python first_rows.py train

A ModernBERT of four layers of 256 with a window of 16 over 8,000 pieces of MeCab's words. terakoya has the recipe of
`tiny_modernbert` with half of its learning rate, as the model is larger; `Trainer` that of Transformers' examples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from terakoya.json_settings.key_paths import apply_overrides

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "architecture.hidden_size=256",
    "architecture.num_hidden_layers=4",
    "architecture.intermediate_size=672",
    "architecture.initializer_range=0.07",
    "optimizer.learning_rate=2.5e-3",
    'batch_size={"-1": 32}',
    "data.validation=[]",
    "evaluation=null",
)
"""What differs from `tiny_modernbert`."""
MARGIN = 0.8
"""The share of the seconds left that training may take by the speed of its first steps: where both cores of a machine
trained, those of the next twenty minutes took 10 to 13 % longer."""


def main(trainer: str) -> None:
    """Makes the model: `trainer` is "ours" or "train", an action of tools/bench/showcase.py."""
    corpus, out, seed, seconds = (os.environ[name] for name in ("TEXT", "OUT", "SEED", "SECONDS"))
    terakoya(
        "tokenizer", "train", corpus, "--type", "mecab_wordpiece", "--vocab-size", "8000", "--out", "work/tokenizer"
    )
    terakoya("prepare", corpus, "--tokenizer", "work/tokenizer", "--out", "work/store")
    raw = json.loads((ROOT / "parameters/tiny_modernbert.json").read_text(encoding="utf-8"))
    raw = apply_overrides(raw, [*SETTINGS, f"seed={seed}"])
    Path("parameters.json").write_text(json.dumps(raw), encoding="utf-8")
    left = MARGIN * (float(seconds) - sum(os.times()[:4]))  # of this process and those that it started
    made = "run" if trainer == "ours" else out
    showcase = [sys.executable, str(ROOT / "tools/bench/showcase.py"), trainer, "parameters.json"]
    subprocess.run([*showcase, "--seconds", str(left), "--out", made], check=True)
    if trainer == "ours":
        terakoya("export", made, "--out", out)


def terakoya(*words: str) -> None:
    """Runs a command. Raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, "-m", "terakoya", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1])
