"""What a GPU is asked: how fast runs are there, and whether they are right.

    python tools/gpu/hour.py --part B --out RESULTS

Parts B and C are the two calls of a machine that is lent for a quarter of an hour; `stages.py` has the stages of all
parts. The stages of a call run one after another in one process, which imports torch once. This program starts it,
tells it which stage is next, and ends it where a stage hangs: another process then goes on with the stage after it.
Each measurement is a line of RESULTS/hour.jsonl, written as soon as it is known. `--tiny` runs the same code at toy
size on a CPU.
tools/gpu/README.md says how to take all of it to a machine without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one card: `Trainer` would divide rows among all
if "--tiny" in sys.argv:  # a CPU computes the fused kernels in Triton's interpreter, which is chosen at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")

import measured
from processes import Beside

if TYPE_CHECKING:  # torch takes seconds to import, which the process of the stages pays alone
    from settings import Measurement, Settings, Stage

MINUTES = {"A": 9.0, "B": 8.0, "C": 4.0, "D": 20.0}
"""When each part ends at the latest, its imports included."""
PATIENCE, LEAST = 3, 60.0
"""A stage is ended after so many times its seconds, and not before so many seconds."""
IMPORTS = 180.0
"""Seconds after which a process of stages that has not begun is given up: on a machine just started it may take 30."""
NOT_SHOWN = {"part", "stage", "time", *measured.WHERE}


def main() -> int:
    """Runs a part, or some of its stages. Returns the exit status: 1 where a stage failed or was left out, 2 where none
    can run."""
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        try:
            missing = run_part(arguments, serve, arguments, Path(work))
        except LookupError as error:
            print(f"hour.py: {error.args[0]}", file=sys.stderr)
            return 2
    print("", *measured.goals(arguments.out / measured.FILE, "en"), sep="\n")
    if missing:
        print("failed or left out:", *missing, sep="\n  ", file=sys.stderr)
    return int(bool(missing))


def run_part(arguments: argparse.Namespace, serve: Callable[..., None], *given: Any) -> list[str]:
    """Runs the stages that were asked for in processes that `serve(*given, pipe)`, one after another until the time is
    over. Returns those that failed or were left out, with the reason.

    Raises:
        LookupError: there is no such stage, no GPU, or no process of stages begins.
    """
    minutes = MINUTES[arguments.part] if arguments.minutes is None else arguments.minutes
    end, missing = time.monotonic() + 60 * minutes, []
    with contextlib.ExitStack() as held:
        process: Beside | None
        process, known = _started(held, serve, given)
        wanted = arguments.only or [""]
        numbers = [number for number, (name, _) in enumerate(known) if any(each in name for each in wanted)]
        if not numbers:
            names = "\n  ".join(name for name, _ in known)
            raise LookupError(f"no stage has {' or '.join(wanted)} in its name; these are there:\n  {names}")
        for number in numbers:
            name, seconds = known[number]
            left = max(0.0, end - time.monotonic())
            if left < (1.0 if arguments.tiny else seconds):
                missing.append(f"{name}: left out, as {left:.0f} s were left")
                keep(arguments, name, {"left_out": f"{left:.0f} s left"})
                continue
            if process is None:
                process, _ = _started(held, serve, given)
            begun = time.monotonic()
            failure, process = _run(process, number, left if arguments.tiny else limit(seconds, left))
            print(f"{name}: {failure or 'ended'}, {time.monotonic() - begun:.0f} of {seconds:.0f} s", flush=True)
            missing += [f"{name}: {failure}"] * bool(failure)
            if process is None:
                keep(arguments, name, {"error": failure})
    return missing


def limit(seconds: float, left: float) -> float:
    """Returns after how many seconds a stage is ended that takes `seconds`, where so many are `left` for all."""
    return min(left, max(LEAST, PATIENCE * seconds))


def _started(
    held: contextlib.ExitStack, serve: Callable[..., None], given: Sequence[Any]
) -> tuple[Beside, list[tuple[str, float]]]:
    """Returns a process of stages, which is ended with `held`, and the name and the seconds of each of its stages."""
    process = Beside(serve, *given)
    held.callback(process.end)
    try:
        known = process.answer(IMPORTS)
    except (EOFError, TimeoutError) as error:
        raise LookupError("the process of the stages did not begin") from error
    if isinstance(known, str):
        raise LookupError(known)
    return process, known


def _run(process: Beside, number: int, seconds: float) -> tuple[str, Beside | None]:
    """Runs a stage. Returns why it failed, empty where it did not, and the process where it can go on."""
    try:
        process.pipe.send(number)
        return process.answer(seconds), process
    except TimeoutError:
        failure = f"ended, as it took more than {seconds:.0f} s"
    except (EOFError, OSError):
        failure = "its process ended without a word"
    process.end()
    return failure, None


def serve(arguments: argparse.Namespace, work: Path, pipe: Connection) -> None:
    """Sends the names and seconds of the stages of a part, or why there are none; then runs each whose number comes,
    and sends why it failed."""
    import torch
    from settings import Settings
    from stages import PARTS

    if not arguments.tiny and not torch.cuda.is_available():
        pipe.send("no CUDA device here; --tiny tests the script on a CPU")
        return
    stages, settings = PARTS[arguments.part], Settings(arguments.out, work, arguments.tiny, arguments.store)
    pipe.send([(each.name, each.seconds) for each in stages])
    log = (arguments.out / f"{arguments.part}.log").open("a", buffering=1)
    with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log), contextlib.suppress(EOFError):
        while True:
            failure = run_stage(arguments, stages[pipe.recv()], settings)
            if not arguments.tiny:
                torch.cuda.synchronize()  # a device that is lost ends this process, and another one goes on
            pipe.send(failure)


def run_stage(arguments: argparse.Namespace, stage: Stage, settings: Settings) -> str:
    """Runs a stage here and keeps each of its measurements. Returns why it failed, empty where it did not."""
    from turns_at_device import describe, forget_runs

    from terakoya.training.model import determinism

    forget_runs()
    failures = []
    documents = "random ids" if settings.store is None else settings.store.name
    try:
        with determinism.restore_choice():
            for measurement in stage.run(settings):
                keep(arguments, stage.name, {**measurement, "documents": documents, **where()})
                failures += [measurement["error"]] if measurement.get("error") else []
    except Exception as error:  # noqa: BLE001 - what fails is known, too, and others follow
        traceback.print_exc()
        failures.append(describe(error))
        keep(arguments, stage.name, {"error": failures[-1], **where()})
    return "; ".join(failures)


def keep(arguments: argparse.Namespace, stage: str, measurement: Measurement) -> None:
    """Appends a line with the `measurement` to the results, and prints it."""
    line = {"part": arguments.part, "stage": stage, **measurement, "time": round(time.time())}
    with (arguments.out / measured.FILE).open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    print(f"  {stage}  {shown(line)}", file=sys.__stdout__, flush=True)


@cache
def where() -> Mapping[str, str]:
    """Returns the device, the versions and the commit, which is empty where it is not known."""
    import torch
    import transformers
    from settings import ROOT

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


def shown(line: Measurement) -> str:
    """Returns what a line of the results says beside the name of its stage."""
    return "  ".join(
        f"{key} {' '.join(measured.written(value).split())[:60]}"
        for key, value in line.items()
        if key not in NOT_SHOWN and (key not in ("preset", "variant") or value not in line["stage"])
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--part", choices=sorted(MINUTES), required=True)
    parser.add_argument("--minutes", type=float, help=f"when the part ends at the latest; by part {MINUTES}")
    parser.add_argument("--out", type=Path, required=True, help="the folder for results and logs")
    packed = measured.ROOT / "store" if (measured.ROOT / "store" / "store.json").exists() else None
    parser.add_argument("--store", type=Path, default=packed, help="a token store; without one, random ids")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU: a test of this script")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS",
                        help="the stages with these words in their names; may be given several times")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
