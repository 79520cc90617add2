"""From jsonl to a token store with SentencePiece, beside Megatron-LM and datatrove: whole commands, in turns.

    python tools/bench/prepare.py CORPUS.jsonl.gz --tokenizer SENTENCEPIECE_FOLDER \
        --megatron CHECKOUT --megatron-python PYTHON --datatrove-python PYTHON --datatrove-tokenizer FILE

Ours is `terakoya prepare --append-eos --processes 2` on the plain jsonl file, Megatron-LM's is
`tools/preprocess_data.py --workers 2 --append-eod`, datatrove's is `DocumentTokenizer` in two tasks under its local
executor, with the same model as a tokenizer.json. Megatron-LM's files are compared with ours byte by byte.
Its encoding phase is what it reports itself, which leaves its start-up out; ours is from the first finished block to
the last, in proportion. A side without its Python or
checkout is left out. Exits with 1 below a goal.
"""

from __future__ import annotations

import argparse
import filecmp
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

GOALS = {"Megatron-LM": 5.0, "Megatron-LM, encoding": 1.7, "datatrove": 8.0}
WORKERS = 2

OURS = """
import json, sys, time
from pathlib import Path
from terakoya.commands.prepare import prepare
if __name__ == "__main__":
    told = []
    prepare([Path(sys.argv[1])], tokenizer=Path(sys.argv[2]), out=Path(sys.argv[3]), append_eos=True,
            processes=int(sys.argv[4]), progress=lambda done, total: told.append((time.perf_counter(), done / total)))
    (first, before), (last, _) = told[0], told[-1]
    print(json.dumps({"encoding": (last - first) / (1 - before)}))
"""

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    folder, tokenizer, out, workers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    LocalPipelineExecutor(
        [JsonlReader(folder), DocumentTokenizer(out, tokenizer, eos_token="</s>", shuffle_documents=False)],
        tasks=workers, workers=workers, logging_dir=out + "/logs",
    ).run()
"""

# Megatron-LM's newest wants a decorator that Python 3.12 brought.
MEGATRON = """
import runpy, sys, typing, typing_extensions
typing.override = typing_extensions.override
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> int:
    """Prints a table. Returns the exit status."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        work = Path(temporary)
        corpus = work / "corpus.jsonl"
        with gzip.open(arguments.corpus) as source, corpus.open("wb") as target:
            shutil.copyfileobj(source, target)
        megabytes = corpus.stat().st_size / 1e6
        halves = _halves(corpus, work / "halves")
        ways: dict[str, Callable[[Path], float | None]] = {
            "terakoya": lambda out: _ours(corpus, arguments.tokenizer, out)
        }
        if arguments.megatron:
            ways["Megatron-LM"] = lambda out: _megatron(corpus, arguments, out)
        if arguments.datatrove_python:
            ways["datatrove"] = lambda out: _datatrove(halves, arguments, out)
        wall: dict[str, list[float]] = {name: [] for name in ways}
        encoding: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(arguments.rounds):
            for name, way in ways.items():
                out = work / f"{name}-{round_}"
                began = time.perf_counter()
                phase = way(out)
                wall[name].append(time.perf_counter() - began)
                if phase is not None:
                    encoding[name].append(phase)
                print(f"round {round_ + 1}  {name:12} {wall[name][-1]:6.1f} s", flush=True)
            if arguments.megatron:
                for ours, theirs in (
                    ("tokens.bin", "text_text_document.bin"),
                    ("tokens.idx", "text_text_document.idx"),
                ):
                    same = filecmp.cmp(
                        work / f"terakoya-{round_}" / ours, work / f"Megatron-LM-{round_}" / theirs, False
                    )
                    print(f"round {round_ + 1}  {ours}: {'the same bytes' if same else 'DIFFERENT BYTES'}")
            for name in ways:
                shutil.rmtree(work / f"{name}-{round_}")
    return _table(megabytes, wall, encoding)


def _table(megabytes: float, wall: dict[str, list[float]], encoding: dict[str, list[float]]) -> int:
    print(f"\n{megabytes:.0f} MB of jsonl, {WORKERS} workers, medians of {len(wall['terakoya'])}\n")
    print("| way | whole command, s | MB/s | ours is | encoding, s | MB/s | ours is |\n|---|---|---|---|---|---|---|")
    missed = False
    for name in wall:
        seconds = statistics.median(wall[name])
        ratio = statistics.median(a / b for a, b in zip(wall[name], wall["terakoya"], strict=True))
        missed |= ratio < GOALS.get(name, 0)
        cells = [name, f"{seconds:.1f}", f"{megabytes / seconds:.1f}", f"{ratio:.2f} x", "", "", ""]
        if encoding[name]:
            seconds = statistics.median(encoding[name])
            ratio = statistics.median(a / b for a, b in zip(encoding[name], encoding["terakoya"], strict=True))
            missed |= ratio < GOALS.get(f"{name}, encoding", 0)
            cells[4:] = [f"{seconds:.1f}", f"{megabytes / seconds:.1f}", f"{ratio:.2f} x"]
        print(f"| {' | '.join(cells)} |")
    print(f"\ngoals {GOALS}: {'MISSED' if missed else 'reached'}")
    return int(missed)


def _ours(corpus: Path, tokenizer: Path, out: Path) -> float:
    done = _run([sys.executable, "-c", OURS, corpus, tokenizer, out, WORKERS])
    return float(json.loads(done.splitlines()[-1])["encoding"])


def _megatron(corpus: Path, arguments: argparse.Namespace, out: Path) -> float:
    out.mkdir()
    script = arguments.megatron / "tools" / "preprocess_data.py"
    model = next(arguments.tokenizer.glob("*.model"))
    said = _run(
        [
            arguments.megatron_python, "-c", MEGATRON, script, "--input", corpus, "--output-prefix", out / "text",
            "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model, "--append-eod",
            "--workers", WORKERS, "--log-interval", 1000,
        ]
    )  # fmt: skip
    documents, rate = re.findall(r"Processed (\d+) documents \(([\d.]+) docs/s", said)[-1]
    return int(documents) / float(rate)


def _datatrove(halves: Path, arguments: argparse.Namespace, out: Path) -> None:
    _run([arguments.datatrove_python, "-c", DATATROVE, halves, arguments.datatrove_tokenizer, out, WORKERS])


def _halves(corpus: Path, folder: Path) -> Path:
    """The corpus as one file a worker, which is how datatrove shares work."""
    folder.mkdir()
    lines = corpus.read_bytes().splitlines(keepends=True)
    for worker in range(WORKERS):
        part = lines[worker * len(lines) // WORKERS : (worker + 1) * len(lines) // WORKERS]
        (folder / f"{worker}.jsonl").write_bytes(b"".join(part))
    return folder


def _run(command: list[object]) -> str:
    """Runs a command; returns what it printed. Raises with its words if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(part) for part in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])
    return done.stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path, help="a jsonl.gz file with a field text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder of kind sentencepiece")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--megatron-python", help="a Python that has what it imports")
    parser.add_argument("--datatrove-python", help="a Python that has datatrove")
    parser.add_argument("--datatrove-tokenizer", type=Path, help="the same model as a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where a few GB can lie for a while")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
