"""The demo: the whole pipeline on a small bundled corpus, in less than two minutes on two CPU cores.

The demo writes a pipeline JSON and runs it as `terakoya run` does, so that a user can change the file and run it again.
The corpus tells of one small town, its people and its seasons, in few words: little enough to learn something from in
a minute. What makes that minute suffice is in docs/explanation/recipes.md.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from terakoya.atomic_files import write_atomically
from terakoya.errors import UserError
from terakoya.process_pool import available_cores
from terakoya_pipeline.run import Pipeline
from terakoya_pipeline.stages import StageResult

SENTENCES = (
    "パン屋の森さんは、毎朝たくさんの[MASK]を焼きます。",
    "お父さんの[MASK]が、魚をたくさん積んで港へ帰ってきました。",
    "図書館の林さんは、新しい[MASK]を棚に並べました。",
    "中村さんは、自転車に乗って[MASK]を届けます。",
)
"""What the finished model completes. None of them is in the corpus."""
HELD_OUT = 20  # documents
MAX_STEPS = 600


@dataclass(frozen=True)
class Demo:
    """The files that the demo writes and reads."""

    folder: Path

    @property
    def hashes(self) -> Path:
        """The SHA-256 of each corpus and pipeline that a demo has written here."""
        return self.folder / ".demo.json"

    @property
    def corpus(self) -> Path:
        """A copy of the bundled corpus."""
        return self.folder / "corpus.txt"

    @property
    def pipeline_file(self) -> Path:
        """The pipeline JSON."""
        return self.folder / "pipeline.json"

    @property
    def model(self) -> Path:
        """The folder of the finished model."""
        return self.folder / "model"

    def pipeline(self, *, max_steps: int = MAX_STEPS) -> dict[str, Any]:
        """Returns the pipeline's JSON: a vocabulary of 2,500 and a ModernBERT of 3 layers of 128."""
        return {
            "corpus": [str(self.corpus)],
            "hold_out": HELD_OUT,
            "tokenizer": {
                "type": "mecab_wordpiece",
                "dictionary": "unidic_lite",
                "vocab_size": 2500,
                "limit_alphabet": 2000,
            },
            "tokenizer_folder": str(self.folder / "tokenizer"),
            "store": str(self.folder / "store"),
            "validation_store": str(self.folder / "store.validation"),
            "parameters": {
                "data": {"sequence_length": 128},
                "architecture": {
                    "type": "modernbert",
                    "hidden_size": 128,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                    "intermediate_size": 256,
                    "max_position_embeddings": 128,
                    "local_attention": 16,
                    "initializer_range": 0.1,
                },
                "objective": {
                    "type": "masked_lm",
                    "layout": "packed",
                    "whole_word_mask": True,
                    "mlm_probability": {"start": 0.3, "end": 0.15},
                },
                "optimizer": {
                    "type": "muon",
                    "learning_rate": 1e-2,
                    "norm_factor": 0.25,
                    "weight_decay": 0.1,
                    "momentum": 0.9,
                    "betas": [0.8, 0.95],
                },
                "schedule": {"type": "linear", "warmup_steps": max(1, max_steps // 15)},
                "batch_size": {"-1": 16},
                "max_steps": max_steps,
                "logging_steps": 50,
                "precision": "fp32",
                "checkpoint": {"save_steps": max(1, max_steps // 2)},
                "evaluation": {"steps": max(1, max_steps // 4)},
                "trackers": [{"type": "tensorboard"}],
            },
            "run": str(self.folder / "run"),
            "export": str(self.model),
            "training_processes": min(2, available_cores()),
        }

    def write(self, *, max_steps: int = MAX_STEPS, fresh: bool = False) -> Pipeline:
        """Writes corpus and pipeline, after removing the output of an earlier demo with other settings, or of any if
        `fresh`. Raises UserError if one of both files is there and is not as a demo wrote it, so that the output may be
        the user's."""
        text = json.dumps(self.pipeline(max_steps=max_steps), ensure_ascii=False, indent=2) + "\n"
        corpus = (resources.files("terakoya.corpus") / "demo_town.txt").read_bytes()
        wanted = {self.pipeline_file: text.encode(), self.corpus: corpus}
        there = {file: file.read_bytes() for file in wanted if file.is_file()}
        written: list[str] = json.loads(self.hashes.read_bytes()) if self.hashes.is_file() else []
        for file, content in there.items():
            if content != wanted[file] and _hash(content) not in written:
                raise UserError(
                    f"{file}: is not as a demo wrote it, and what is beside it may be yours: choose another --out, or "
                    "remove it first"
                )
        if self.pipeline_file in there and (fresh or there != wanted):
            self.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        known = sorted({*written, *map(_hash, wanted.values())})
        for file, content in {self.hashes: json.dumps(known).encode(), **wanted}.items():
            with write_atomically(file) as stream:
                stream.write(content)
        return Pipeline.model_validate_json(text)

    def remove(self) -> None:
        """Deletes what a demo made in the folder, and nothing else."""
        for name in ("tokenizer", "store", "store.split", "store.validation", "run", "model"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / f".{name}.stage.json").unlink(missing_ok=True)

    def validations(self) -> list[dict[str, Any]]:
        """Returns the validation records of the run, in order."""
        lines = (self.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "validation"]


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def summary_lines(demo: Demo, results: list[StageResult]) -> Iterator[str]:
    """Yields the lines of the summary: each of `results`, the losses, an example, the path of the model."""
    from terakoya.log import translated
    from terakoya_inference.predictions import fill_mask

    descriptions = {
        "tokenizer": "trained a MeCab + WordPiece tokenizer on the bundled corpus",
        "prepare": "turned the corpus into token ids",
        "prepare validation": f"and its last {HELD_OUT} documents, kept aside for validation",
        "train": "trained a small ModernBERT to predict masked words",
        "export": "wrote the model as a Transformers folder",
    }
    for number, result in enumerate(results, start=1):
        time = translated("made earlier") if result.skipped else f"{result.seconds:.1f} s"
        yield f"{number}. {translated(descriptions[result.name])} ({time}): {result.out}"
    validations = demo.validations()
    before, after = validations[0], validations[-1]
    yield ""
    yield (
        f"Validation loss {before['loss']:.3f} -> {after['loss']:.3f}, masked words predicted correctly "
        f"{before['masked_accuracy']:.1%} -> {after['masked_accuracy']:.1%}, "
        f"before the first step and after step {after['step']:,}."
    )
    yield "Its best words for [MASK] in sentences that are not in the corpus:"
    for sentence in SENTENCES:
        guesses = fill_mask(demo.model, sentence, top=4)[0]
        yield f"  {sentence}  " + "  ".join(f"{guess.word} {guess.probability:.1%}" for guess in guesses)
    yield "(It knows one small town. A real corpus teaches it the world.)"
    yield ""
    yield f"The model is in {demo.model}. In Transformers:"
    yield "  from transformers import AutoModelForMaskedLM, AutoTokenizer"
    yield f'  model = AutoModelForMaskedLM.from_pretrained("{demo.model}")'
    yield f'  tokenizer = AutoTokenizer.from_pretrained("{demo.model}")'
    yield ""
    again = f"terakoya run {shlex.quote(str(demo.pipeline_file))}"
    yield f"The pipeline is in {demo.pipeline_file}: change it and run `{again}`."
