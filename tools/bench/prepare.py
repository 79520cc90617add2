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
import re
import sys
import tempfile
from pathlib import Path

from prepare_turns import WORKERS, Way, compare, ours, plain, run

GOALS = {"Megatron-LM": 5.0, "Megatron-LM, encoding": 1.7, "datatrove": 8.0}

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
        megabytes = plain(arguments.corpus, corpus)
        halves = _halves(corpus, work / "halves")
        ways = {"terakoya": Way(lambda out: ours(corpus, arguments.tokenizer, out, append_eos=True))}
        if arguments.megatron:
            same = {"tokens.bin": "text_text_document.bin", "tokens.idx": "text_text_document.idx"}
            ways["Megatron-LM"] = Way(lambda out: _megatron(corpus, arguments, out), same)
        if arguments.datatrove_python:
            ways["datatrove"] = Way(lambda out: _datatrove(halves, arguments, out))
        return compare(ways, GOALS, rounds=arguments.rounds, work=work, megabytes=megabytes)


def _megatron(corpus: Path, arguments: argparse.Namespace, out: Path) -> float:
    out.mkdir()
    script = arguments.megatron / "tools" / "preprocess_data.py"
    model = next(arguments.tokenizer.glob("*.model"))
    said = run(
        [
            arguments.megatron_python, "-c", MEGATRON, script, "--input", corpus, "--output-prefix", out / "text",
            "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model, "--append-eod",
            "--workers", WORKERS, "--log-interval", 1000,
        ]
    )  # fmt: skip
    told = re.findall(r"Processed (\d+) documents \(([\d.]+) docs/s", said)
    if not told:
        raise SystemExit("Megatron-LM tells its rate every 1,000 documents: expected a corpus of more")
    documents, rate = told[-1]
    return int(documents) / float(rate)


def _datatrove(halves: Path, arguments: argparse.Namespace, out: Path) -> None:
    run([arguments.datatrove_python, "-c", DATATROVE, halves, arguments.datatrove_tokenizer, out, WORKERS])


def _halves(corpus: Path, folder: Path) -> Path:
    """The corpus as one file a worker, which is how datatrove shares work."""
    folder.mkdir()
    lines = corpus.read_bytes().splitlines(keepends=True)
    for worker in range(WORKERS):
        part = lines[worker * len(lines) // WORKERS : (worker + 1) * len(lines) // WORKERS]
        (folder / f"{worker}.jsonl").write_bytes(b"".join(part))
    return folder


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
