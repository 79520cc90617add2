"""Do models trained here serve in other people's programs? Trains a BERT and a GPT on a corpus, and tries each.

    python tools/real_input/programs/run.py CORPUS OUT --minutes 20 --names UD_JAPANESE_GSD
    python tools/real_input/programs/run.py CORPUS OUT --recipe bert_ja --names UD_JAPANESE_GSD

Trains, exports, and reads the exports in environments that it makes below OUT with pip: older versions of Transformers,
sentence-transformers, ONNX Runtime, llama.cpp (which pip compiles). With `--here` it makes none: what is installed here
is tried, and the rest is named. With `--recipe bert_ja` it trains one encoder by that preset's recipe, and only finds
names with it. What is finished in OUT stays. README.md beside the folder has what it printed. Ends with 1 if an output
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parents[1]
sys.path.insert(0, str(TOOLS))
sys.path.insert(0, str(TOOLS / "older_transformers"))
sys.path.insert(0, str(HERE))

import models  # noqa: E402
import table  # noqa: E402

from environments import make_environment  # noqa: E402

HERE_NAME = "Transformers of terakoya"
TEXTS = 100
"""Held-out lines that other programs read."""
PROGRAMS = ("onnx", "onnxscript", "onnxruntime", "gguf", "sentence-transformers", "llama-cpp-python")
"""What pip installs for ONNX Runtime, llama.cpp and sentence-transformers."""
ON_TRANSFORMERS_4 = (
    ("Optimum", ("optimum-onnx[onnxruntime]", *table.FURTHER)),
    ("sentence-transformers", ("transformers==4.57.6", "sentence-transformers<6", *table.FURTHER)),
    ("sentence-transformers", ("transformers==4.45.2", "sentence-transformers==3.4.1", *table.FURTHER)),
)
"""Programs that run on Transformers 4, and what pip installs for them: they read what the environment above wrote."""


@dataclass(frozen=True)
class Check:
    """One script and the Python that runs it.

    Attributes:
        name: what is tried, for the screen.
        python: the environment's Python.
        arguments: the script and what it gets.
    """

    name: str
    python: str | Path
    arguments: Sequence[str | Path]

    def run(self) -> bool:
        """Runs the script and shows what it prints. Returns whether it ended with 0."""
        print(f"\n== {self.name}", flush=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.run([self.python, *self.arguments], env=environment, check=False).returncode == 0


def train(corpus: Path, out: Path, minutes: float) -> None:
    """Makes OUT/bert, OUT/gpt, OUT/models and OUT/texts.json; each model gets half of `minutes`."""
    for recipe in (models.BERT, models.GPT):
        models.train(recipe, corpus, out, minutes=minutes / 2)
    texts = models.read_held_out(corpus, out / models.BERT.name, TEXTS)
    (out / "texts.json").write_text(json.dumps(texts, ensure_ascii=False, indent=1), encoding="utf-8")
    for recipe in (models.BERT, models.GPT):
        models.describe(recipe, out, texts)


def find_checks(out: Path, versions: Sequence[str], names: Path | None, *, here: bool) -> list[Check]:
    """Returns what is tried, and makes the environments for it."""
    pythons: dict[str, str | Path] = {HERE_NAME: sys.executable}
    environments = out / "environments"
    for version in [] if here else versions:
        pythons[f"Transformers {version}"] = table.make_transformers(environments / version, version)
    checks = []
    for name, python in pythons.items():
        checks.append(
            Check(f"{name}: ids and logits", python, [TOOLS / "older_transformers" / "read.py", out / "models"])
        )
        checks.append(Check(f"{name}: answers", python, [HERE / "answers.py", out]))
    other = sys.executable if here else make_programs(out)
    programs = ("ONNX Runtime", "sentence-transformers", "llama.cpp")
    checks.append(Check("other programs", other, [HERE / "exported.py", out, *programs]))
    for number, (program, packages) in enumerate(() if here else ON_TRANSFORMERS_4):
        python = make_environment(environments / f"older-{number}", packages)
        checks.append(
            Check(
                f"{program} on Transformers 4: {packages[0]}, {packages[1]}",
                python,
                [HERE / "exported.py", out, program],
            )
        )
    if names is not None:
        checks += [find_names(out / "models" / "bert", names, name, python) for name, python in [*pythons.items()][:2]]
    return checks


def make_programs(out: Path) -> Path:
    """Returns the Python of the environment with terakoya and the programs that its exporters write for."""
    return make_environment(out / "environments" / "programs", PROGRAMS, with_terakoya=True)


def find_names(model: Path, names: Path, name: str, python: str | Path) -> Check:
    """Returns the check that tunes `model` to find names; `names` has the files of UD Japanese GSD."""
    train, test = (next(names.glob(f"*-{part}.conllu*")) for part in ("dev", "test"))
    return Check(f"{name}: names", python, [HERE / "entities.py", model, "--train", train, "--test", test])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if an output differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="documents: jsonl, txt, parquet, ...")
    parser.add_argument("out", type=Path, help="a folder for everything that is made")
    parser.add_argument("--minutes", type=float, default=20, help="of training, for both models together; 0 is a toy")
    parser.add_argument("--names", type=Path, help="a folder with *-dev.conllu and *-test.conllu (.gz), for names")
    parser.add_argument("--transformers", nargs="*", default=["4.57.6", "4.45.2"], help="older versions to try")
    parser.add_argument("--recipe", choices=["bert_ja"], help="train one encoder by this recipe, for names alone")
    parser.add_argument("--here", action="store_true", help="make no environments; try what is installed here")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    if options.recipe:
        if options.names is None:
            parser.error("--recipe finds names: give --names")
        models.train(models.BERT_JA, options.corpus.resolve(), out, minutes=options.minutes)
        checks = [find_names(out / "models" / models.BERT_JA.name, options.names, HERE_NAME, sys.executable)]
    else:
        train(options.corpus.resolve(), out, options.minutes)
        checks = find_checks(out, options.transformers, options.names, here=options.here)
    results = {check.name: check.run() for check in checks}
    print("\n" + "\n".join(f"{'ok   ' if right else 'WRONG'} {name}" for name, right in results.items()))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
