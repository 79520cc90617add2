"""Trains a small BERT and a small GPT on a corpus through the command line, exports both, and writes what terakoya
itself computes with them beside the files of each export."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "older_transformers"))

HOLD_OUT = 0.01
"""The share of documents that validation gets; the texts that other programs read are from them, too."""
PROBE = 12
"""Steps of the run that measures how many fit into the minutes."""
BATCH: Mapping[str, Any] = {"batch_size": {"-1": 16}, "logging_steps": 2, "seed": 42}
SIZES: Mapping[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


@dataclass(frozen=True)
class Recipe:
    """How one model is made.

    Attributes:
        name: the folder below OUT.
        head: what the model is trained to do, as `older_transformers/write.py` calls it.
        kind: the tokenizer's type.
        tokenizer: its settings.
        toy: those that replace some of them in a toy.
        parameters: the parameter file without data and steps.
        steps: how many steps training takes; None leaves it to the minutes that it is given.
    """

    name: str
    head: Literal["masked", "causal"]
    kind: str
    tokenizer: Mapping[str, Any]
    toy: Mapping[str, Any]
    parameters: Mapping[str, Any]
    steps: int | None = None


BERT = Recipe(
    "bert",
    "masked",
    "mecab_wordpiece",
    {"vocab_size": 12000, "limit_alphabet": 3000},
    {"vocab_size": 500, "limit_alphabet": 200},
    {
        "architecture": {"type": "bert", **SIZES, "intermediate_size": 1024, "max_position_embeddings": 128},
        "objective": {"type": "masked_lm", "whole_word_mask": True, "layout": "packed"},
        "optimizer": {"type": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01, "eps": 1e-6},
    },
)
GPT = Recipe(
    "gpt",
    "causal",
    "sentencepiece",
    {"vocab_size": 8000, "input_sentence_size": 50000, "shuffle_input_sentence": True},
    {"vocab_size": 1200, "character_coverage": 0.98, "hard_vocab_limit": False},
    {
        "architecture": {
            "type": "llama", **SIZES, "intermediate_size": 704, "num_key_value_heads": 2, "rope_theta": 10000.0,
            "max_position_embeddings": 128,
        },
        "objective": {"type": "causal_lm", "layout": "packed"},
        "optimizer": {"type": "adamw", "learning_rate": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    },
)  # fmt: skip
BERT_JA = Recipe(
    "bert_ja",
    "masked",
    "mecab_wordpiece",
    {"vocab_size": 8000, "limit_alphabet": 3000},
    {"vocab_size": 500, "limit_alphabet": 200},
    {
        "architecture": {
            "type": "modernbert", "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6,
            "intermediate_size": 512, "max_position_embeddings": 128, "local_attention": 16,
        },
        "objective": {
            "type": "masked_lm", "mlm_probability": {"start": 0.3, "end": 0.15}, "whole_word_mask": True,
            "layout": "packed",
        },
        "optimizer": {"type": "muon", "learning_rate": 5e-3, "weight_decay": 0.1},
        "max_grad_norm": 1.0,
    },
    steps=1500,
)  # fmt: skip
"""What parameters/bert_ja.json takes to a size for one GPU, at the size of docs/explanation/recipes.md."""
TINY: Mapping[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def train(recipe: Recipe, corpus: Path, out: Path, *, minutes: float) -> None:
    """Makes OUT/NAME/tokenizer, store, store.val and run, and OUT/models/NAME; what is there already stays.

    Args:
        minutes: how long training takes, if the recipe does not say; 0 makes a toy of a few steps.
    """
    models, out = out / "models", out / recipe.name
    out.mkdir(parents=True, exist_ok=True)
    clean = out / "clean.json"
    clean.write_text(json.dumps([{"type": "hold_out", "share": HOLD_OUT if minutes else 0.2}]), encoding="utf-8")
    source = ["--clean", clean, "--clean-folder", out / "clean"]
    settings = {**recipe.tokenizer, **({} if minutes else recipe.toy)}
    given = [each for key, value in settings.items() for each in ("--set", f"{key}={json.dumps(value)}")]
    _make(out / "tokenizer", "tokenizer", "train", corpus, "--type", recipe.kind, *given, "--processes", "1")
    for name, further in (("store", []), ("store.val", ["--held-out"])):
        made = [corpus, *source, *further, "--tokenizer", out / "tokenizer", "--processes", "1"]
        _make(out / name, "prepare", *made)
    steps = (recipe.steps or _count_steps(recipe, out, minutes)) if minutes else 4
    _make(out / "run", "train", _write_parameters(recipe, out, "run", steps, is_toy=not minutes), "--processes", "1")
    _make(models / recipe.name, "export", out / "run")


def describe(recipe: Recipe, out: Path, texts: Sequence[str]) -> None:
    """Writes OUT/models/NAME/expected.json: ids, offsets and logits of `texts` as terakoya's own code computes them
    from the checkpoint, in the form that `older_transformers/read.py` reads."""
    import write

    from terakoya.conversion.export import build_models, find_checkpoint
    from terakoya.plugins.create import create_component
    from terakoya.runs.checkpoints import read_manifest
    from terakoya.toolkit.architectures import attention

    checkpoint = find_checkpoint(out / recipe.name / "run")
    manifest = read_manifest(checkpoint)
    settings = dict(manifest["parameters"]["architecture"])
    architecture = create_component("architectures", settings.pop("type"), settings, where="architecture")
    kind = create_component("tokenizers", recipe.kind, {}, where="tokenizer")
    model = build_models(checkpoint, manifest)[""].eval()
    attention.use(model, "sdpa")
    expected = write.describe(checkpoint / "tokenizer", kind, architecture, model, recipe.head, (*write.TEXTS, *texts))
    (out / "models" / recipe.name / "expected.json").write_text(
        json.dumps(expected, ensure_ascii=False), encoding="utf-8"
    )


def read_held_out(corpus: Path, out: Path, count: int) -> list[str]:
    """Returns `count` lines of 10 to 90 characters, one of each document that `train` held out of `corpus`."""
    from terakoya.corpus.corpus import Corpus, Document
    from terakoya.plugins.cleaning import read_cleaning

    held_out = read_cleaning(out / "clean.json")(Corpus([corpus]), out / "clean", True)
    documents = (each for block in held_out.blocks() for each in held_out.read(block) if isinstance(each, Document))
    lines = (next((line for line in each.text.splitlines() if 10 <= len(line) <= 90), None) for each in documents)
    return list(itertools.islice(filter(None, lines), count))


def _count_steps(recipe: Recipe, out: Path, minutes: float) -> int:
    """Measures how many steps `minutes` have room for."""
    if (out / "parameters.run.json").exists():
        return int(json.loads((out / "parameters.run.json").read_text(encoding="utf-8"))["max_steps"])
    _make(out / "probe", "train", _write_parameters(recipe, out, "probe", PROBE), "--processes", "1")
    lines = (out / "probe" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [record for record in map(json.loads, lines) if record["kind"] == "step"][-1]
    return max(PROBE, int(60 * minutes * last["tokens_per_second"] * last["step"] / last["tokens"]))


def _write_parameters(recipe: Recipe, out: Path, name: str, steps: int, *, is_toy: bool = False) -> Path:
    """Returns the parameter file of a run of `steps` steps."""
    parameters = {**BATCH, **recipe.parameters}
    if is_toy:
        parameters["architecture"] = {**recipe.parameters["architecture"], **TINY}
    parameters |= {
        "data": {"train": [{"store": str(out / "store"), "weight": 1.0}], "sequence_length": 128},
        "schedule": {"type": "linear", "warmup_steps": max(1, steps // 20)},
        "max_steps": steps,
        "checkpoint": {"save_steps": steps},
    }
    if name == "run":
        parameters["data"]["validation"] = [str(out / "store.val")]
        parameters["evaluation"] = {"steps": max(1, steps // 4), "batches": 20}
    file = out / f"parameters.{name}.json"
    file.write_text(json.dumps(parameters, indent=2), encoding="utf-8")
    return file


def _make(out: Path, *arguments: object) -> None:
    """Runs `terakoya ARGUMENTS --out OUT` if OUT is not there."""
    if out.exists() and arguments[0] != "train":
        return
    terakoya(*arguments, "--out", out)


def terakoya(*arguments: object) -> None:
    """Prints and runs a command. Raises SystemExit with its output if it fails."""
    words = [str(each) for each in arguments]
    print("$ terakoya", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "terakoya", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
