"""What word borders are worth for names: the same encoder over several tokenizers, fine-tuned to find names.

    python tools/bench/names.py CORPUS --gsd UD_JAPANESE_GSD --work FOLDER [--ner ner.json] [--tokenizer NAME=FOLDER]

Trains the recipe of `bert_ja` at a small size over three tokenizers with as many pieces (MeCab's words and WordPiece,
SentencePiece, SentencePiece within MeCab's words) and any others that are given, each for the same CPU seconds. A name
counts where its first and last character and its kind are right, so a name whose border is inside a token is missed.
The names of UD Japanese GSD are its runs of proper nouns (tools/real_input/programs/entities.py), learned from its dev
set and found in its test set; those of `ner.json` are Stockmark's of Wikipedia, divided as the suite `ner_ja` has it.
Prints F1 with a 95 % interval over the seeds, of training and fine-tuning, and writes FOLDER/names.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from terakoya_compare.statistics import student_quantile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_input" / "programs"))

SENTENCEPIECE = ["--type", "sentencepiece", "--special-tokens", "bert", "--input-sentence-size", "200000"]
TOKENIZERS: Mapping[str, Sequence[str]] = {
    "MeCab, WordPiece": ["--type", "mecab_wordpiece"],
    "SentencePiece": SENTENCEPIECE,
    "SentencePiece in MeCab's words": [*SENTENCEPIECE, "--pretokenization-delimiter", "||||"],
}
PROBE_STEPS = 40
"""Steps of the run that measures how much CPU time a step takes."""
SUITE = {
    "name": "names",
    "url": "https://universaldependencies.org/treebanks/ja_gsd",
    "settings": {"learning_rates": [5e-4], "epochs": [4], "seeds": 1, "batch_size": 16, "max_length": 128},
    "tasks": {
        "gsd": {
            "title": "Proper nouns of UD Japanese GSD", "task": "ner", "scores": ["f1", "precision", "recall"],
            "files": {"train": "gsd/train.jsonl", "eval": "gsd/test.jsonl"}, "settings": {"epochs": [20]},
        },
        "wikipedia": {
            "title": "Names in Wikipedia", "task": "ner", "scores": ["f1", "precision", "recall"],
            "files": {"all": "ner.json"}, "shares": {"train": 0.8, "eval": 0.2}, "columns": {"spans": "entities"},
        },
    },
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Trains, fine-tunes and prints a line for each tokenizer. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--gsd", type=Path, required=True, help="the folder with ja_gsd-ud-dev and -test.conllu.gz")
    parser.add_argument("--ner", type=Path, help="Stockmark's ner.json")
    parser.add_argument("--work", type=Path, required=True, help="the folder for all files; what is there is kept")
    parser.add_argument("--tokenizer", action="append", default=[], metavar="NAME=FOLDER", help="another tokenizer")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=1500, help="of the first tokenizer; the others get its CPU time")
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 6))
    parser.add_argument("--jobs", type=int, default=1, help="how many models at once, each with one thread")
    parser.add_argument("--preset", default="tiny_modernbert")
    arguments = parser.parse_args(argv)
    work = arguments.work
    write_examples(arguments.gsd, arguments.ner, work / "data")
    suite = json.loads(json.dumps(SUITE))
    if not arguments.ner:
        del suite["tasks"]["wikipedia"]
    (work / "names.yaml").write_text(json.dumps(suite), encoding="utf-8")  # JSON is YAML
    given = dict(each.split("=", 1) for each in arguments.tokenizer)
    steps: list[int] = []
    budget = None
    for number, name in enumerate(names := [*TOKENIZERS, *given]):
        folder = work / str(number)
        tokenizer = Path(given[name]) if name in given else folder / "tokenizer"
        if name in TOKENIZERS and not tokenizer.exists():
            size = ["--vocab-size", str(arguments.vocab_size)]
            terakoya("tokenizer", "train", str(arguments.corpus), *TOKENIZERS[name], *size, "--out", str(tokenizer))
        if not (folder / "store").exists():
            words = ["--tokenizer", str(tokenizer), "--out", str(folder / "store")]
            terakoya("prepare", str(arguments.corpus), *words)
        step = seconds_of_step(folder, arguments)
        budget = budget or step * arguments.steps
        steps.append(max(1, round(budget / step)))
        print(f"{name}: {steps[-1]:,} steps", file=sys.stderr)

    def model(number: int, seed: int) -> Any:
        folder = work / str(number)
        run, out, scores = (folder / f"{kind}-{seed}" for kind in ("run", "model", "scores.json"))
        if not scores.exists():
            train(folder, run, steps[number], seed, arguments)
            terakoya("export", str(run), "--out", str(out))
            terakoya(
                "evaluate", str(out), "--tasks", str(work / "names.yaml"), "--data", str(work / "data"),
                "--seeds", "1", "--out", str(scores),
            )  # fmt: skip
        return json.loads(scores.read_text(encoding="utf-8"))

    pairs = [(number, seed) for seed in range(1, arguments.seeds + 1) for number in range(len(names))]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        made = dict(zip(pairs, pool.map(lambda pair: model(*pair), pairs), strict=True))
    found = {name: [each for (of, _), each in made.items() if of == number] for number, name in enumerate(names)}
    (work / "names.json").write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print_table(found, list(suite["tasks"]))
    return 0


def write_examples(gsd: Path, ner: Path | None, data: Path) -> None:
    """Writes the examples of the tasks below `data`."""
    import entities

    (data / "gsd").mkdir(parents=True, exist_ok=True)
    for source, name in (("dev", "train"), ("test", "test")):
        lines = entities.examples(gsd / f"ja_gsd-ud-{source}.conllu.gz")
        (data / "gsd" / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if ner is not None:
        shutil.copy(ner, data / "ner.json")


def train(folder: Path, run: Path, steps: int, seed: int, arguments: argparse.Namespace) -> float:
    """Trains a run and returns its CPU seconds. Whole words are masked where the tokenizer knows words."""
    words = bool(json.loads((folder / "store" / "store.json").read_text(encoding="utf-8")).get("word_starts"))
    settings = {
        "data.train": [{"store": str(folder / "store")}], "data.validation": [], "evaluation": None,
        "max_steps": steps, "schedule.warmup_steps": max(1, steps // 15), "seed": seed, "trackers": [],
        "objective.whole_word_mask": words, "checkpoint.save_steps": steps,
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    terakoya("train", arguments.preset, "--out", str(run), *changes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_of_step(folder: Path, arguments: argparse.Namespace) -> float:
    """Returns the CPU seconds of a step, without the start: the difference of a longer and a shorter run."""
    kept = folder / "step.json"
    if not kept.exists():
        seconds = []
        for steps in (PROBE_STEPS, PROBE_STEPS // 4):
            run = folder / f"probe-{steps}"
            shutil.rmtree(run, ignore_errors=True)
            seconds.append(train(folder, run, steps, 0, arguments))
        kept.write_text(json.dumps((seconds[0] - seconds[1]) / (PROBE_STEPS - PROBE_STEPS // 4)), encoding="utf-8")
    return max(1e-4, float(kept.read_text(encoding="utf-8")))


def print_table(found: Mapping[str, Sequence[Any]], tasks: Sequence[str]) -> None:
    """Prints the mean F1 of each tokenizer with half of its 95 % interval, the mean difference from the first, and the
    recall that the borders of its tokens allow."""
    titles = [f"{kind} of {task}" for task in tasks for kind in ("F1", "recall limit")]
    print(f"| Tokenizer | {' | '.join(titles)} |\n|---|{'---:|' * len(titles)}")
    first: dict[str, float] = {}
    for name, runs in found.items():
        cells = []
        for task in tasks:
            values = [score(each, task, "f1") for each in runs]
            mean = statistics.mean(values)
            half = student_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
            difference = mean - first.setdefault(task, mean)
            cells.append(f"{mean:.3f} ± {half:.3f}" + (f" ({difference:+.3f})" if name != next(iter(found)) else ""))
            cells.append(f"{score(runs[-1], task, 'recall_limit'):.3f}")
        print(f"| {name} | {' | '.join(cells)} |")


def score(scores: Any, task: str, kind: str) -> float:
    """Returns a score of `task` in what `terakoya evaluate --out` wrote."""
    return float(scores["finetuned"][task]["scores"]["eval"][kind]["mean"])


def terakoya(*words: str) -> None:
    """Runs a command with one thread. Raises CalledProcessError where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "terakoya", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


if __name__ == "__main__":
    sys.exit(main())
