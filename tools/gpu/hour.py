"""The first hour on a GPU: does terakoya run there, is it right, how fast is it.

    python tools/gpu/hour.py --part A --minutes 8.5 --out RESULTS

Part A asks whether it runs and is right, part B measures encoders, part C decoders; each ends within the minutes given.
Every stage is a process of its own with a limit of its own; `stages.py` is the table of them. Each measurement is a
line of RESULTS/hour.jsonl, written as soon as it is there, so that a run that is cut off keeps what it has. `--tiny`
runs the same code at toy size on a CPU. tools/gpu/README.md says how to take all of it to a machine without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one card: `Trainer` would divide rows among all
if "--tiny" in sys.argv:  # a CPU computes the fused kernels in Triton's interpreter, which is chosen at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")

import measured
import torch
import transformers
from settings import ROOT, Measurement, Settings, Stage
from stages import of_part, warms

LEAST = 20.0
"""Seconds that a stage needs at least: no other one is started when fewer are left."""
WIDEST = 60
"""Characters of a text in the printed table."""


def main() -> int:
    """Runs a part, or one of its stages. Returns the exit status: 1 where a stage failed or ran out of time."""
    arguments = _arguments()
    if not arguments.tiny and not torch.cuda.is_available():
        print("hour.py: no CUDA device here; --tiny tests the script on a CPU", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        work = arguments.work or Path(held.enter_context(tempfile.TemporaryDirectory()))
        if arguments.stage is not None:
            settings = Settings(
                arguments.out, work, arguments.tiny, arguments.store, arguments.seconds, warm=arguments.warm
            )
            run_stage(of_part(arguments.part)[arguments.stage], settings)
            return 0
        run = warm_part if arguments.warm else run_part
        failed = run(arguments, work)
    if not arguments.warm:
        print_table(arguments.out / measured.FILE, arguments.part)
    if failed:
        print(f"failed or cut off: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def run_part(arguments: argparse.Namespace, work: Path) -> list[str]:
    """Runs the stages of a part one after another; returns the names of those that did not end well."""
    end = time.monotonic() + 60 * arguments.minutes
    failed, remaining = [], chosen(arguments)
    while remaining:
        left = end - time.monotonic()
        seconds = left if arguments.tiny else limit(remaining, left)  # a stage's own is for a GPU
        name = remaining.pop(0).name
        if left < LEAST:
            failed.append(f"{name} (no time left)")
            continue
        options = ["--stage", name, "--work", str(work), "--seconds", f"{seconds:.1f}"]
        start = time.monotonic()
        log = arguments.out / f"{arguments.part}-{name}.log"
        code = run_process([sys.executable, __file__, *sys.argv[1:], *options], log, seconds)
        said = {0: "ended", None: "cut off"}.get(code, f"exit code {code}")
        print(f"{name}: {said} after {time.monotonic() - start:.0f} of {seconds:.0f} s", flush=True)
        if code != 0:
            failed.append(name)
    return failed


def chosen(arguments: argparse.Namespace) -> list[Stage]:
    """Returns the stages of the part that were asked for, in the order of the part. Exits where it has no such one."""
    stages = of_part(arguments.part)
    names = arguments.only.split(",") if arguments.only else list(stages)
    if unknown := [name for name in names if name not in stages]:
        sys.exit(f"hour.py: --only {','.join(unknown)}: part {arguments.part} has {', '.join(stages)}")
    return [stage for name, stage in stages.items() if name in names]


def warm_part(arguments: argparse.Namespace, work: Path) -> list[str]:
    """Lets the runs of all stages that measure rates compile at once: their measurements then begin with a full cache
    of the compiler. Returns the names of those that did not end well."""
    seconds = 60 * arguments.minutes

    def warm_stage(stage: Stage) -> bool:
        folder = work / stage.name
        folder.mkdir()
        own = ["--stage", stage.name, "--work", str(folder), "--seconds", f"{seconds:.1f}"]
        log = arguments.out / f"{arguments.part}-{stage.name}-warm.log"
        return run_process([sys.executable, __file__, *sys.argv[1:], *own], log, seconds) == 0

    stages = [stage for stage in chosen(arguments) if warms(stage)]
    with ThreadPoolExecutor(max(1, len(stages))) as threads:
        ended_well = list(threads.map(warm_stage, stages))
    return [stage.name for stage, is_well in zip(stages, ended_well, strict=True) if not is_well]


def limit(stages: Sequence[Stage], left: float) -> float:
    """Returns how long the first of `stages` may take, where `left` seconds are left for all: its own seconds, and its
    share of what nobody needs."""
    return min(left, stages[0].seconds * max(1.0, left / sum(each.seconds for each in stages)))


def run_process(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Runs a stage, which prints into `log`; returns its exit code, or None where it was ended, with its processes,
    after so many seconds."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def run_stage(stage: Stage, settings: Settings) -> None:
    """Runs one stage in this process and keeps each of its measurements."""
    for measurement in stage.run(settings):
        documents = "random ids" if settings.store is None else settings.store.name
        place = {"part": stage.part, "stage": stage.name, "documents": documents}
        keep(settings.out / measured.FILE, {**place, **measurement})


def keep(file: Path, measurement: Measurement) -> None:
    """Appends a line with the `measurement` and where it was taken."""
    line = {**measurement, "time": round(time.time()), **where()}
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")
        lines.flush()


@cache
def where() -> Mapping[str, str]:
    """Returns the device, the versions and the commit, which is empty where it is not known."""
    packed, ask = ROOT / "commit", ["git", "rev-parse", "--short", "HEAD"]  # of a pack, of a clone
    commit = packed.read_text() if packed.exists() else ""
    if not commit:
        with contextlib.suppress(OSError):  # no git here
            commit = subprocess.run(ask, cwd=ROOT, capture_output=True).stdout.decode()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.strip(),
    }


def print_table(file: Path, part: str) -> None:
    """Prints the measurements of `part`, a line each, and beside rates of training the goals."""
    lines = file.read_text().splitlines() if file.exists() else []
    for measurement in map(json.loads, lines):
        if measurement["part"] == part:
            print(f"{measurement['stage']:16} {shown(measurement)}")
    if file.exists() and part != "A":
        print("", *measured.goals(file, "en"), sep="\n")


def shown(measurement: Measurement) -> str:
    """Returns what the `measurement` says of itself, in a line."""
    hidden = {"part", "stage", "documents", "time", *where()}
    texts = {key: value for key, value in measurement.items() if key not in hidden}
    return "  ".join(
        f"{key} {value:,.6g}" if isinstance(value, float) else f"{key} {' '.join(str(value).split())[:WIDEST]}"
        for key, value in texts.items()
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--part", choices=["A", "B", "C"], required=True)
    parser.add_argument("--minutes", type=float, default=8.5, help="when the part ends at the latest")
    parser.add_argument("--out", type=Path, required=True, help="the folder for results and logs")
    packed = ROOT / "store" if (ROOT / "store" / "store.json").exists() else None
    parser.add_argument("--store", type=Path, default=packed, help="a token store; without one, random ids")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU: a test of this script")
    parser.add_argument("--only", help="names of stages, with commas between them, instead of all of the part")
    parser.add_argument("--warm", action="store_true", help="only compile what stages of rates compile, all at once")
    parser.add_argument("--stage", help="run this stage alone, in this process")
    parser.add_argument("--seconds", type=float, default=600.0, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
