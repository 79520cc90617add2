"""Whole commands from jsonl to a token store, in turns: what `prepare.py` and `prepare_mecab.py` share."""

from __future__ import annotations

import filecmp
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

WORKERS = 2

OURS = """
import json, sys, time
from pathlib import Path
from terakoya import prepare
if __name__ == "__main__":
    told = []
    prepare([Path(sys.argv[1])], tokenizer=Path(sys.argv[2]), out=Path(sys.argv[3]), append_eos=sys.argv[5] == "True",
            processes=int(sys.argv[4]), progress=lambda done, total: told.append((time.perf_counter(), done / total)))
    (first, before), (last, _) = told[0], told[-1]
    print(json.dumps({"encoding": (last - first) / (1 - before) if before < 1 else None}))
"""


@dataclass(frozen=True)
class Way:
    """One way from the corpus to files in a folder.

    `run` makes the folder it is given and returns the seconds of its encoding phase, None if they are not known.
    `same` names the files that have to be, byte for byte, those of terakoya: its name -> this way's name.
    """

    run: Callable[[Path], float | None]
    same: Mapping[str, str] = field(default_factory=dict)


def plain(source: Path, target: Path, *, documents: int | None = None) -> float:
    """Writes the first `documents` lines of jsonl.gz (all without) as plain jsonl. Returns its megabytes."""
    with gzip.open(source) as lines, target.open("wb") as out:
        out.writelines(islice(lines, documents))
    return target.stat().st_size / 1e6


def ours(corpus: Path, tokenizer: Path, out: Path, *, append_eos: bool) -> float | None:
    """`terakoya prepare --processes 2`. Returns the encoding's seconds: from the first finished block to the last, in
    proportion; None where the corpus is one block."""
    done = run([sys.executable, "-c", OURS, corpus, tokenizer, out, WORKERS, append_eos])
    encoding = json.loads(done.splitlines()[-1])["encoding"]
    return None if encoding is None else float(encoding)


def compare(ways: Mapping[str, Way], goals: Mapping[str, float], *, rounds: int, work: Path, megabytes: float) -> int:
    """Runs all `ways` in turns, the first of them ours, and prints a table. Returns the exit status: 1 where a goal is
    missed or bytes differ."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    encoding: dict[str, list[float]] = {name: [] for name in ways}
    differ = False
    our_name = next(iter(ways))
    for number in range(rounds):
        for name, way in ways.items():
            out = work / name
            began = time.perf_counter()
            phase = way.run(out)
            wall[name].append(time.perf_counter() - began)
            if phase is not None:
                encoding[name].append(phase)
            print(f"round {number + 1}  {name:22} {wall[name][-1]:6.1f} s", flush=True)
            for mine, theirs in way.same.items():
                same = filecmp.cmp(work / our_name / mine, out / theirs, shallow=False)
                differ |= not same
                print(f"round {number + 1}  {mine}: {'the same bytes' if same else 'DIFFERENT BYTES'}", flush=True)
        for name in ways:
            shutil.rmtree(work / name)
    missed = _table(megabytes, wall, encoding, goals)
    return int(missed or differ)


def _table(
    megabytes: float, wall: dict[str, list[float]], encoding: dict[str, list[float]], goals: Mapping[str, float]
) -> bool:
    our_name, *_ = wall
    print(
        f"\n{megabytes:.0f} MB of jsonl, {WORKERS} workers, medians of {len(wall[our_name])}; load {os.getloadavg()}\n"
    )
    print("| way | whole command, s | MB/s | ours is | encoding, s | MB/s | ours is |\n|---|---|---|---|---|---|---|")
    missed = False
    for name in wall:
        seconds = statistics.median(wall[name])
        ratio = statistics.median(a / b for a, b in zip(wall[name], wall[our_name], strict=True))
        missed |= ratio < goals.get(name, 0)
        cells = [name, f"{seconds:.1f}", f"{megabytes / seconds:.1f}", f"{ratio:.2f} x", "", "", ""]
        if encoding[name]:
            seconds = statistics.median(encoding[name])
            cells[4:6] = [f"{seconds:.1f}", f"{megabytes / seconds:.1f}"]
        if encoding[name] and encoding[our_name]:
            ratio = statistics.median(a / b for a, b in zip(encoding[name], encoding[our_name], strict=True))
            missed |= ratio < goals.get(f"{name}, encoding", 0)
            cells[6] = f"{ratio:.2f} x"
        print(f"| {' | '.join(cells)} |")
    print(f"\ngoals {dict(goals)}: {'MISSED' if missed else 'reached'}")
    return missed


def run(command: list[object]) -> str:
    """Runs a command on one thread a process; returns what it printed. Raises RuntimeError with its words if it
    fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what runs from a checkout is compiled once, as for its users
    done = subprocess.run(
        [str(part) for part in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])
    return done.stdout
