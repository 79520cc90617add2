"""A fixed text, a fixed budget, fixed tests: what is the best encoder that anybody makes of it?

    python tools/leaderboard/leaderboard.py text REPOSITORIES --work WORK
    python tools/leaderboard/leaderboard.py enter "Mine" --work WORK -- COMMAND ...
    python tools/leaderboard/leaderboard.py page

`text` writes WORK/text.jsonl and the tests from clones of four repositories, whose commits fixed_text.py names.

`enter` runs COMMAND once for each of three seeds, in a folder of its own that is empty at first, with these variables
in its environment: TEXT, the file; SEED; OUT, the folder where it leaves a model that Transformers loads, with its
tokenizer; SECONDS, the budget. These are CPU seconds of COMMAND and all that it starts, from the text to the model, so
they include the tokenizer; with `--budget gpu-30min` they are seconds of the clock. Then each model is fine-tuned on
the tests and added to the row in rows/. What is done is kept there and in WORK: the same command goes on, for models
that are not in the row also in another WORK, on another machine with the same processor.

`page` writes the rows into README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import fixed_text
import torch
import transformers
import yaml

from terakoya.toolkit.fast_products import describe_processor
from terakoya_compare.statistics import student_quantile

HERE = Path(__file__).resolve().parent
ROWS, PAGE, SUITE = HERE / "rows", HERE / "README.md", HERE / "suite.yaml"
BUDGETS = {"core-20min": 1200, "core-2h": 7200, "gpu-30min": 1800}
"""Seconds: of processor time, or of the clock with one GPU."""
SEEDS = 3
TASKS = {"jsts": "pearson", "jnli": "accuracy", "jcommonsenseqa": "accuracy", "names": "f1"}
"""Test -> the score that counts."""
TABLE = re.compile(r"(?<=<!-- rows -->\n)(.*\n)*?(?=<!-- end of rows -->)")


def main(argv: list[str] | None = None) -> int:
    """Does what was asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    transformers.logging.set_verbosity_error()
    actions = parser.add_subparsers(dest="action", required=True)
    each = actions.add_parser("text")
    each.add_argument("repositories", type=Path, help="the folder with the clones, as owner/name")
    each.add_argument("--work", type=Path, required=True)
    each = actions.add_parser("enter")
    each.add_argument("name", help="the row's name")
    each.add_argument("--work", type=Path, required=True)
    each.add_argument("--budget", choices=list(BUDGETS), default="core-20min", help="CPU time, or that of one GPU")
    each.add_argument("--jobs", type=int, default=1, help="how many seeds at once, after the first")
    each.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what makes the model")
    actions.add_parser("page")
    arguments = parser.parse_args(argv)
    if arguments.action == "text":
        arguments.work.mkdir(parents=True, exist_ok=True)
        found = fixed_text.make(arguments.repositories, arguments.work)
        print(f"{arguments.work / 'text.jsonl'}: {found}")
        return int(found != fixed_text.TEXT_SHA256)
    if arguments.action == "enter":
        return enter(arguments.name, arguments.work, arguments.budget, arguments.command, jobs=arguments.jobs)
    PAGE.write_text(TABLE.sub(table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def enter(name: str, work: Path, budget: str, command: Sequence[str], *, jobs: int = 1) -> int:
    """Makes and scores the models of a row, unless they are in it, and adds each to it. The first model chooses the
    learning rate of each test for the others. Returns the exit status: 1 if a model took too long."""
    mark = re.sub(r"\W+", "-", f"{budget} {name.lower()}").strip("-")
    path, writing = ROWS / f"{mark}.json", Lock()
    device = torch.device("cuda" if _is_of_gpu(budget) else "cpu")
    row: dict[str, Any] = {
        "name": name, "budget": budget, "processor": describe_processor(device), "models": {},
    }  # fmt: skip
    if path.exists():
        begun, here = json.loads(path.read_text(encoding="utf-8")), row["processor"]
        if begun["processor"] != here:
            sys.exit(f"{path} was begun on {begun['processor']}, this is {here}: not one row")
        row = begun

    def model(seed: int) -> bool:
        if str(seed) in row["models"]:
            return True
        folder = work / mark / str(seed)
        kept = folder / "facts.json"
        if not kept.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            seconds = make(command, folder, work / "text.jsonl", seed, budget)
            print(f"{name}, seed {seed}: {seconds:,.0f} of {BUDGETS[budget]:,} s", flush=True)
            parameters = transformers.AutoModel.from_pretrained(
                folder / "model", local_files_only=True, trust_remote_code=False
            ).num_parameters()
            kept.write_text(json.dumps({"seconds": round(seconds), "parameters": parameters}), encoding="utf-8")
        facts: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        if facts["seconds"] > BUDGETS[budget]:
            return False
        found = score(folder, work / "data", row["models"].get("1", {}).get("rates", {}))
        facts["rates"] = {task: found[task]["settings"]["learning_rate"] for task in TASKS}
        facts["scores"] = {task: round(found[task]["scores"]["test"][kind]["mean"], 4) for task, kind in TASKS.items()}
        with writing:
            row["models"][str(seed)] = facts
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(row, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return True

    with ThreadPoolExecutor(jobs) as pool:
        return int(not all([model(1), *pool.map(model, range(2, SEEDS + 1))]))


def make(command: Sequence[str], folder: Path, corpus: Path, seed: int, budget: str) -> float:
    """Runs `command` in `folder` and returns the seconds that it took. Raises CalledProcessError where it fails."""
    given = {"TEXT": str(corpus.resolve()), "SEED": str(seed), "SECONDS": str(BUDGETS[budget])}
    given["OUT"] = str(folder.resolve() / "model")
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **given})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.monotonic() - began if _is_of_gpu(budget) else usage.ru_utime + usage.ru_stime


def _is_of_gpu(budget: str) -> bool:
    return budget.startswith("gpu")


def score(folder: Path, data: Path, rates: Mapping[str, float]) -> dict[str, Any]:
    """Fine-tunes the model in `folder` on each test, with the `rates` that are known, and keeps what was seen there.
    Returns it by test."""
    suite, found = yaml.safe_load(SUITE.read_text(encoding="utf-8")), dict[str, Any]()
    for task in TASKS:
        out, asked = folder / f"{task}.json", folder / f"{task}.yaml"
        if not out.exists():
            test = suite["tasks"][task]
            if task in rates:
                test.setdefault("settings", {})["learning_rates"] = [rates[task]]
            asked.write_text(yaml.safe_dump(suite | {"tasks": {task: test}}), encoding="utf-8")
            words = ["evaluate", str(folder / "model"), "--tasks", str(asked), "--data", str(data), "--out", str(out)]
            subprocess.run([sys.executable, "-m", "terakoya", *words], check=True, stdout=subprocess.DEVNULL)
        found |= json.loads(out.read_text(encoding="utf-8"))["finetuned"]
    return found


def table() -> str:
    """Returns the table of the rows with all seeds, by budget, the best mean first; `±` is half of a 95 % interval over
    them."""
    rows = []
    for path in ROWS.glob("*.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        models = list(row["models"].values())
        if len(models) < SEEDS:
            continue
        scores = [each["scores"] for each in models]
        means = [statistics.mean(each[task] for task in TASKS) for each in scores]
        cells = [_mean_of(means), *(_mean_of([each[task] for each in scores]) for task in TASKS)]
        size = f"{models[0]['parameters'] / 1e6:.1f} M"
        place = list(BUDGETS).index(row["budget"]), -statistics.mean(means)
        rows.append((place, [row["budget"], row["name"], size, *cells, row["processor"]]))
    titles = ["Budget", "", "Parameters", "Mean", "JSTS", "JNLI", "JCommonsenseQA", "Names", "Processor"]
    lines = [titles, ["---", "---", *["---:"] * (len(titles) - 3), "---"]]
    lines += [cells for _, cells in sorted(rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _mean_of(values: Sequence[float]) -> str:
    half = student_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


if __name__ == "__main__":
    sys.exit(main())
