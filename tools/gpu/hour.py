"""The first hour on a GPU: does terakoya run there, is it right, how fast is it.

    python tools/gpu/hour.py --part A --minutes 8.5 --out RESULTS

Part A asks whether it runs and is right, part B measures encoders, part C decoders; each ends within the minutes given.
Every stage is a process of its own with a limit of its own. Each measurement is a line of RESULTS/hour.jsonl, written
as soon as it is there, so that a run that is cut off keeps what it has. `--tiny` runs the same code at toy size on a
CPU. tools/gpu/README.md says how to take all of it to a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from settings import ROOT, Measurement, Settings, Stage

FILE = "hour.jsonl"
WORST_START = 20.0
"""Seconds that a stage needs at least: no other one is started when fewer are left."""


def parts() -> Mapping[str, Mapping[str, Stage]]:
    """Returns the stages of each part, in their order."""
    import correctness
    import rates

    return {"A": correctness.STAGES, "B": rates.ENCODERS, "C": rates.DECODERS}


def main() -> int:
    """Runs a part, or one of its stages. Returns the exit status: 1 where a stage failed or ran out of time."""
    arguments = _arguments()
    if not arguments.tiny and not torch.cuda.is_available():
        print("hour.py: no CUDA device here; --tiny tests the script on a CPU", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.stage is not None:
        settings = Settings(arguments.out, arguments.work, arguments.tiny, arguments.corpus, arguments.tokenizer)
        run_stage(arguments.part, arguments.stage, settings)
        return 0
    with tempfile.TemporaryDirectory() as work:
        failed = run_part(arguments, Path(work))
    print_table(arguments.out / FILE, arguments.part)
    if failed:
        print(f"failed or cut off: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run_part(arguments: argparse.Namespace, work: Path) -> list[str]:
    """Runs the stages of a part one after another; returns the names of those that did not end well."""
    end = time.monotonic() + 60 * arguments.minutes
    failed = []
    for name, stage in parts()[arguments.part].items():
        left = end - time.monotonic()
        if left < WORST_START:
            failed.append(f"{name} (no time left)")
            continue
        command = [sys.executable, __file__, *sys.argv[1:], "--stage", name, "--work", str(work)]
        start = time.monotonic()
        limit = left if arguments.tiny else min(stage.seconds, left)  # a stage's own is for a GPU
        with (arguments.out / f"{arguments.part}-{name}.log").open("w") as log:
            try:
                code = subprocess.run(
                    command, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        print(f"{name}: {'ended' if not code else f'exit code {code}'} after {time.monotonic() - start:.0f} s")
        if code:
            failed.append(name)
    return failed


def run_stage(part: str, name: str, settings: Settings) -> None:
    """Runs one stage in this process and keeps each of its measurements."""
    for measurement in parts()[part][name].run(settings):
        keep(settings.out / FILE, {"part": part, "stage": name, **measurement})


def keep(file: Path, measurement: Measurement) -> None:
    """Appends a line with the `measurement` and where it was taken."""
    line = {**measurement, "time": round(time.time()), **where()}
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")
        lines.flush()


def where() -> dict[str, str]:
    """Returns the device, the versions and the commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": os.environ.get("TERAKOYA_COMMIT", commit.stdout.strip()),
    }


def print_table(file: Path, part: str) -> None:
    """Prints the measurements of `part`, a line each."""
    hidden = {"part", "stage", "time", *where()}
    for line in file.read_text().splitlines() if file.exists() else []:
        measurement = json.loads(line)
        if measurement["part"] != part:
            continue
        shown = {key: value for key, value in measurement.items() if key not in hidden}
        text = "  ".join(
            f"{key} {value:,.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
        )
        print(f"{measurement['stage']:12} {text}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--part", choices=["A", "B", "C"], required=True)
    parser.add_argument("--minutes", type=float, default=8.5, help="when the part ends at the latest")
    parser.add_argument("--out", type=Path, required=True, help="the folder for results and logs")
    parser.add_argument("--corpus", type=Path, help="jsonl[.gz] with a field text; without it, random ids")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's folder, for the corpus")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU: a test of this script")
    parser.add_argument("--stage", help="run this stage alone, in this process")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
