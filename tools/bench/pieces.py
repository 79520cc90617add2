"""Text to ids with one tokenizer: `prepare`'s encoder beside the library that the tokenizer is of, the same ids.

    python tools/bench/pieces.py CORPUS.jsonl.gz... --tokenizer FOLDER --megabytes 5 --rounds 5

The libraries are `tokenizers` (`encode_batch_fast`, where the folder has a tokenizer.json) and SentencePiece
(`EncodeAsNumpy`, where it has a model). With --other SOURCES, the encoder of another checkout takes part. Each has a
process of its own, with one thread; in each round all encode the same new documents, whole, in turns. A rate is
megabytes of UTF-8 text a second of processor time. Ends with 1 if ours has other ids than `tokenizers`, or where there
is no tokenizer.json, than SentencePiece; how many rounds of each have ours' ids is in the table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
from encode import read

ROOT = Path(__file__).resolve().parents[2]
Encode = Callable[[Sequence[str]], np.ndarray]


def our_encode(folder: Path) -> Encode:
    """All ids of documents from terakoya."""
    from terakoya import plugins
    from terakoya.tokenization.recognise import recognise_tokenizer

    plugins.load()
    encoder: Any = recognise_tokenizer(folder).encoder(folder)
    return lambda documents: encoder.encode(documents, whole=True).ids


def tokenizers_encode(folder: Path) -> Encode:
    """All ids of documents from `tokenizers`."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(documents: Sequence[str]) -> np.ndarray:
        rows = [each.ids for each in backend.encode_batch_fast(list(documents), add_special_tokens=False)]
        return np.concatenate([np.array(row, np.int32) for row in rows])

    return encode


def sentencepiece_encode(folder: Path) -> Encode:
    """All ids of documents from SentencePiece."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(next(folder.glob("*.model"))))
    return lambda documents: np.concatenate(processor.EncodeAsNumpy(list(documents), num_threads=1))


KINDS = {
    "ours": our_encode,
    "other": our_encode,
    "tokenizers": tokenizers_encode,
    "sentencepiece": sentencepiece_encode,
}


def serve(kind: str, folder: Path) -> None:
    """Encodes the documents of each line of the standard input, and prints the seconds and the ids' hash."""
    encode = KINDS[kind](folder)
    for line in sys.stdin:
        documents = json.loads(line)
        began = time.process_time()
        ids = encode(documents)
        seconds = time.process_time() - began
        digest = hashlib.sha256(ids.astype(np.int32).tobytes()).hexdigest()
        print(json.dumps([seconds, digest, len(ids)]), flush=True)


class Side:
    """One way to encode, in a process of its own."""

    def __init__(self, kind: str, folder: Path, sources: Path) -> None:
        paths = [str(sources / "core"), str(sources / "plugins")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, __file__, "--serve", kind, "--tokenizer", str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.rates: list[float] = []
        self.digests: list[str] = []
        self.tokens = 0
        self._run(["寺子屋で読み書きを習う。" * 100] * 1000)

    def _run(self, documents: Sequence[str]) -> tuple[float, str, int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(documents) + "\n")
        self._process.stdin.flush()
        seconds, digest, tokens = json.loads(self._process.stdout.readline())
        return seconds, digest, tokens

    def encode(self, documents: Sequence[str]) -> None:
        """Encodes `documents` and notes the rate and the hash."""
        seconds, digest, tokens = self._run(documents)
        self.rates.append(sum(len(text.encode()) for text in documents) / seconds / 1e6)
        self.digests.append(digest)
        self.tokens += tokens

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Prints a table; returns 1 if ours has other ids than Transformers' library."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="*", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--megabytes", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder: Path = options.tokenizer
    if options.serve:
        serve(options.serve, folder)
        return 0

    documents = read(options.corpus, int(options.megabytes * 1e6))
    kinds = {"ours": ROOT}
    if options.other is not None:
        kinds["other"] = options.other
    if (folder / "tokenizer.json").is_file():
        kinds["tokenizers"] = ROOT
    if any(folder.glob("*.model")):
        kinds["sentencepiece"] = ROOT
    sides = {kind: Side(kind, folder, sources) for kind, sources in kinds.items()}
    for number in range(options.rounds):
        for side in list(sides.values())[:: 1 if number % 2 else -1]:
            side.encode(documents[number :: options.rounds])
    for side in sides.values():
        side.close()
    size = sum(len(text.encode()) for text in documents) / 1e6
    print(f"command: python {' '.join(sys.argv)}")
    print(f"{size:.1f} MB in {len(documents):,} documents, {options.rounds} rounds, medians\n")
    print("| encoder | MB/s | beside ours | rounds with ours' ids | tokens |")
    print("|---|---:|---:|---:|---:|")
    ours = sides["ours"]
    for kind, side in sides.items():
        ratios = [mine / theirs for mine, theirs in zip(ours.rates, side.rates, strict=True)]
        same = sum(mine == theirs for mine, theirs in zip(ours.digests, side.digests, strict=True))
        rate, ratio = statistics.median(side.rates), statistics.median(ratios)
        print(f"| {kind} | {rate:.2f} | {ratio:.2f} x | {same} of {options.rounds} | {side.tokens:,} |")
    truth = sides.get("tokenizers", sides.get("sentencepiece", ours))
    return int(truth.digests != ours.digests)


if __name__ == "__main__":
    sys.exit(main())
