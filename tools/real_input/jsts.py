"""Tunes a model on JSTS, sentence similarity in Japanese, with plain Transformers, beside itself with random weights.

    python tools/real_input/jsts.py MODEL --data DATA/eval/jglue/jsts

JSTS (Kurihara et al., 2022, JGLUE): pairs of captions and how alike they are, 0 to 5. A regression over
`AutoModelForSequenceClassification`, by Transformers' `Trainer`; reported are Pearson's and Spearman's correlation with
the people's judgement on the validation and the test pairs, for each seed. The second model has the same config and
weights drawn anew; all else is equal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

Examples = list[dict[str, Any]]


def read(file: Path, tokenizer: PreTrainedTokenizerBase) -> Examples:
    """The pairs in `file` as the model takes them, with `labels`, a float."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    return [
        {**tokenizer(pair["sentence1"], pair["sentence2"], truncation=True, max_length=128), "labels": pair["label"]}
        for pair in pairs
    ]


def correlations(predicted: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Pearson's and Spearman's correlation of two arrays (n,); equal values share the mean of their ranks."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return tuple(float(np.corrcoef(a, b)[0, 1]) for a, b in ((predicted, wanted), (ranks(predicted), ranks(wanted))))


def tune(model: Any, sets: Mapping[str, Examples], tokenizer: PreTrainedTokenizerBase, options: Any, seed: int) -> Any:
    """Tunes `model` on sets["train"]; returns the correlations on the other sets, by name, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            learning_rate=options.learning_rate,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            warmup_steps=100,
            weight_decay=0.01,
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        collator = DataCollatorWithPadding(tokenizer)
        trainer = Trainer(model, arguments, data_collator=collator, train_dataset=sets["train"])  # type: ignore[arg-type]
        trainer.train()
        found = {}
        for name in (each for each in sets if each != "train"):
            predicted = trainer.predict(sets[name])  # type: ignore[arg-type]
            found[name] = correlations(predicted.predictions.squeeze(-1), np.asarray(predicted.label_ids))
    return found


def main() -> None:
    """Reads the command line, tunes both models with each seed, prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Transformers folder, for example an exported discriminator")
    parser.add_argument("--data", type=Path, required=True, help="the folder of JSTS's gzipped files")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    sets = {name: read(options.data / f"{name}-v1.3.json.gz", tokenizer) for name in ("train", "valid", "test")}
    print(", ".join(f"{name} {len(examples):,}" for name, examples in sets.items()), "pairs; Pearson / Spearman")
    means: dict[str, list[float]] = {}
    for seed in options.seeds:
        for name in ("pre-trained", "random weights"):
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(
                options.model, num_labels=1, problem_type="regression", trust_remote_code=False
            )
            if name == "pre-trained":
                model = AutoModelForSequenceClassification.from_pretrained(
                    options.model, config=config, trust_remote_code=False
                )
            else:
                model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
            found = tune(model, sets, tokenizer, options, seed)
            print(
                f"{name:<14}  seed {seed}  "
                + "  ".join(f"{each} {pearson:.3f} / {spearman:.3f}" for each, (pearson, spearman) in found.items()),
                flush=True,
            )
            means.setdefault(name, []).append(found["test"][0])
    print("mean Pearson on test:", ", ".join(f"{name} {np.mean(each):.3f}" for name, each in means.items()))


if __name__ == "__main__":
    main()
