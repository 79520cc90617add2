"""Do models trained here serve in other people's programs? Trains a BERT and a GPT on a corpus, and tries each.

    python tools/real_input/programs/run.py CORPUS OUT --minutes 20 --names UD_JAPANESE_GSD

Trains, exports, and reads the exports in environments that it makes below OUT with pip: older versions of Transformers,
sentence-transformers, ONNX Runtime, llama.cpp (which pip compiles). With `--here` it makes none: what is installed here
is tried, and the rest is named. What is finished in OUT stays. README.md beside the folder has what it printed. Ends
with 1 if an output differs.
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

TEXTS = 100
"""Held-out lines that other programs read."""
PROGRAMS = ("onnx", "onnxscript", "onnxruntime", "gguf", "sentence-transformers", "llama-cpp-python")
"""What pip installs for ONNX Runtime, llama.cpp and sentence-transformers."""


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
    pythons: dict[str, str | Path] = {"Transformers of terakoya": sys.executable}
    environments = out / "environments"
    for version in [] if here else versions:
        pythons[f"Transformers {version}"] = table.make_transformers(environments / version, version)
    checks = []
    for name, python in pythons.items():
        checks.append(
            Check(f"{name}: ids and logits", python, [TOOLS / "older_transformers" / "read.py", out / "models"])
        )
        checks.append(Check(f"{name}: answers", python, [HERE / "answers.py", out]))
    other = sys.executable if here else make_environment(environments / "programs", PROGRAMS, with_terakoya=True)
    checks.append(Check("other programs", other, [HERE / "exported.py", out]))
    if names is not None:
        train, test = (next(names.glob(f"*-{part}.conllu*")) for part in ("dev", "test"))
        arguments: list[str | Path] = [HERE / "entities.py", out / "models" / "bert", "--train", train, "--test", test]
        checks += [Check(f"{name}: names", python, arguments) for name, python in list(pythons.items())[:2]]
    return checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if an output differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="documents: jsonl, txt, parquet, ...")
    parser.add_argument("out", type=Path, help="a folder for everything that is made")
    parser.add_argument("--minutes", type=float, default=20, help="of training, for both models together; 0 is a toy")
    parser.add_argument("--names", type=Path, help="a folder with *-dev.conllu and *-test.conllu (.gz), for names")
    parser.add_argument("--transformers", nargs="*", default=["4.57.6", "4.45.2"], help="older versions to try")
    parser.add_argument("--here", action="store_true", help="make no environments; try what is installed here")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    train(options.corpus.resolve(), out, options.minutes)
    checks = find_checks(out, options.transformers, options.names, here=options.here)
    results = {check.name: check.run() for check in checks}
    print("\n" + "\n".join(f"{'ok   ' if right else 'WRONG'} {name}" for name, right in results.items()))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
