"""Whole-word masking beside single-token masking, on equal small runs of a BERT that differ in nothing else.

    python tools/bench/whole_words.py --store STORE --validation STORE --work FOLDER --seeds 3 --steps 600

The stores have word starts (`terakoya prepare --words mecab`) and [MASK]. For each seed it trains one run with
`whole_word_mask` and one without: the same rows, weights and number of predicted tokens. Both exported models then fill
the same masks of the validation store, once with whole words masked, once with single tokens. A masked word tells how
much of the language a model knows without the rest of the word; a masked token is what the second run has learned.

Prints each model's loss (nats) and accuracy, and the differences between the two with their 95 % interval over seeds
(Student's t, pairs of one seed).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import terakoya
from terakoya import plugins
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t distribution with 1, 2, ... degrees of freedom."""
MASKS = ("whole words", "single tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints two tables. Returns the exit status."""
    given = _arguments(arguments)
    results: dict[bool, list[dict[str, tuple[float, float]]]] = {True: [], False: []}
    print(f"{'trained on':15} {'seed':>4}   " + "   ".join(f"{masks + ' loss':>19} accuracy" for masks in MASKS))
    for seed in range(given.seeds):
        for whole in (True, False):
            model = _train(given, seed, whole=whole)
            measured = measure(model, given.validation, rows=given.rows, length=given.sequence_length)
            results[whole].append(measured)
            numbers = "   ".join(f"{loss:19.4f} {accuracy:8.4f}" for loss, accuracy in measured.values())
            print(f"{MASKS[not whole]:15} {seed:4}   {numbers}", flush=True)
    if given.seeds < 2:
        return 0
    print("\ntrained on whole words, less trained on single tokens: mean and 95 % interval")
    for masks in MASKS:
        for index, name in enumerate(("loss", "accuracy")):
            pairs = zip(results[True], results[False], strict=True)
            mean, half = interval([one[masks][index] - other[masks][index] for one, other in pairs])
            print(f"{masks + ', ' + name:25} {mean:+8.4f}   from {mean - half:+.4f} to {mean + half:+.4f}")
    return 0


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of at least two differences, and half the width of its 95 % interval."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), STUDENT[len(differences) - 2] * error


def measure(model: Path, validation: Path, *, rows: int, length: int) -> dict[str, tuple[float, float]]:
    """Returns loss and accuracy of the exported `model` at masked tokens, for each of MASKS, on the first `rows`
    rows of `length` tokens of the store `validation`."""
    import torch
    from transformers import AutoModelForMaskedLM

    loaded = AutoModelForMaskedLM.from_pretrained(model, trust_remote_code=False).eval()
    store = TokenStore.open(validation)
    results = {}
    for masks in MASKS:
        settings = {"layout": "stream", "whole_word_mask": masks == "whole words", "mlm_probability": 0.15}
        objective = plugins.registry().component("objectives", "masked_lm").model_validate(settings)
        source = RowSource(store, objective.row_layout(), sequence_length=length, seed=0, shuffle=False)
        loss = right = count = 0.0
        for start in range(0, min(rows, len(source)), 32):
            batch = source.load(0, np.arange(start, min(start + 32, rows, len(source))))
            arrays = objective.collate(batch, store.facts.vocabulary).arrays
            used = arrays["masked_labels"] >= 0
            positions, labels = (torch.from_numpy(arrays[name][used]) for name in ("masked_positions", "masked_labels"))
            with torch.no_grad():
                logits = loaded(input_ids=torch.from_numpy(arrays["input_ids"]).long()).logits.flatten(0, 1)
            predicted = logits[positions.long()]
            loss += float(torch.nn.functional.cross_entropy(predicted, labels.long(), reduction="sum"))
            right += float((predicted.argmax(-1) == labels).sum())
            count += len(labels)
        results[masks] = (loss / count, right / count)
    return results


def _train(given: argparse.Namespace, seed: int, *, whole: bool) -> Path:
    """Trains one run unless it is there already, and returns the folder of its export."""
    run = given.work / f"{'words' if whole else 'tokens'}-{seed}"
    model = run.with_name(f"{run.name}.model")
    if model.exists():
        return model
    settings = {
        "data": {
            "train": [str(given.store)],
            "validation": [str(given.validation)],
            "sequence_length": given.sequence_length,
        },
        "architecture.hidden_size": given.hidden_size,
        "architecture.intermediate_size": 4 * given.hidden_size,
        "architecture.num_hidden_layers": given.layers,
        "objective.layout": "stream",
        "objective.whole_word_mask": whole,
        "max_steps": given.steps,
        "schedule.warmup_steps": given.steps // 10,
        "checkpoint.save_steps": given.steps,
        "logging_steps": given.steps,
        "evaluation": {"steps": given.steps, "batches": 1},
        "trackers": [],
        "seed": seed,
    }
    terakoya.train("tiny_bert", run, overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()])
    terakoya.export(run, model)
    return model


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--store", type=Path, required=True, help="the store to train on")
    parser.add_argument("--validation", type=Path, required=True, help="the store whose masks are filled")
    parser.add_argument("--work", type=Path, required=True, help="a folder for runs and models; finished ones are kept")
    parser.add_argument("--seeds", type=int, default=3, help="from 2 to 10; with 1 there are no intervals")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1000, help="rows of the validation store")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
