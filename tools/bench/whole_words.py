"""Whole-word masking beside single-token masking, on equal small runs of a BERT that differ in nothing else.

    python tools/bench/whole_words.py --store STORE --validation STORE --work FOLDER --seeds 3 --steps 600

The stores have word starts (`terakoya prepare --words mecab`) and [MASK]. For each seed it trains one run with
`whole_word_mask` and one without: the same rows, weights and number of predicted tokens. Both exported models then fill
the same masks of the validation store, once with whole words masked, once with single tokens. A masked word tells how
much of the language a model knows without the rest of the word; a masked token is what the second run has learned.

Prints for each model the loss in bits per character of the masked tokens, the share of masked tokens and that of masked
words that are right as a whole, and the differences between the two with their 95 % interval over seeds (Student's t,
pairs of one seed).
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
    results: dict[bool, list[dict[str, tuple[float, ...]]]] = {True: [], False: []}
    print(f"{'trained on':15} {'seed':>4}   " + "   ".join(f"{masks + ': bits':>20} tokens  words" for masks in MASKS))
    for seed in range(given.seeds):
        for whole in (True, False):
            model = _train(given, seed, whole=whole)
            measured = measure(model, given.validation, rows=given.rows, length=given.sequence_length)
            results[whole].append(measured)
            numbers = "   ".join(f"{bits:20.4f} {tokens:.4f} {words:.4f}" for bits, tokens, words in measured.values())
            print(f"{MASKS[not whole]:15} {seed:4}   {numbers}", flush=True)
    if given.seeds < 2:
        return 0
    print("\ntrained on whole words, less trained on single tokens: mean and 95 % interval")
    for masks in MASKS:
        for index, name in enumerate(("bits", "tokens", "words")):
            pairs = zip(results[True], results[False], strict=True)
            mean, half = interval([one[masks][index] - other[masks][index] for one, other in pairs])
            print(f"{masks + ', ' + name:25} {mean:+8.4f}   from {mean - half:+.4f} to {mean + half:+.4f}")
    return 0


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of at least two differences, and half the width of its 95 % interval."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), STUDENT[len(differences) - 2] * error


def measure(model: Path, validation: Path, *, rows: int, length: int) -> dict[str, tuple[float, ...]]:
    """Returns for each of MASKS the loss of the exported `model` at masked tokens (bits per character), and the shares
    of masked tokens and of words with a masked token that it fills rightly, on the first `rows` rows of `length` tokens
    of the store `validation`."""
    import torch
    from transformers import AutoModelForMaskedLM

    loaded = AutoModelForMaskedLM.from_pretrained(model, trust_remote_code=False).eval()
    store = TokenStore.open(validation)
    text = store.text_per_token
    assert text is not None, "the store does not know how much text its documents are"
    results: dict[str, tuple[float, ...]] = {}
    for masks in MASKS:
        settings = {"layout": "stream", "whole_word_mask": masks == "whole words", "mlm_probability": 0.15}
        objective = plugins.registry().component("objectives", "masked_lm").model_validate(settings)
        source = RowSource(store, objective.row_layout(), sequence_length=length, seed=0, shuffle=False)
        loss = right = count = words = right_words = 0.0
        for start in range(0, min(rows, len(source)), 32):
            batch = source.load(0, np.arange(start, min(start + 32, rows, len(source))))
            arrays = objective.collate(batch, store.facts.vocabulary).arrays
            used = arrays["masked_labels"] >= 0
            positions, labels = (torch.from_numpy(arrays[name][used]) for name in ("masked_positions", "masked_labels"))
            with torch.no_grad():
                logits = loaded(input_ids=torch.from_numpy(arrays["input_ids"]).long()).logits.flatten(0, 1)
            predicted = logits[positions.long()]
            loss += float(torch.nn.functional.cross_entropy(predicted, labels.long(), reduction="sum"))
            is_right = (predicted.argmax(-1) == labels).numpy()
            right += is_right.sum()
            count += len(labels)
            assert batch.word_starts is not None, "the store has no words"
            every = words_right(batch.word_starts, positions.numpy(), is_right)
            right_words += every.sum()
            words += len(every)
        bits = loss / count / math.log(2) / text.characters
        results[masks] = (bits, right / count, right_words / words)
    return results


def words_right(word_starts: np.ndarray, positions: np.ndarray, is_right: np.ndarray) -> np.ndarray:
    """Returns for each word of the rows, `word_starts` (B, T), with predicted tokens whether all of them are right.
    `positions` (P,) are those of the predicted tokens among all B * T, `is_right` (P,) is True for the right ones."""
    starts = word_starts.copy()
    starts[:, 0] = True
    word = np.cumsum(starts)[positions]
    wrong = np.bincount(word, weights=~is_right)
    return wrong[np.bincount(word) > 0] == 0


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
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    stopped_by = terakoya.train("tiny_bert", run, overrides=overrides).stopped_by
    if stopped_by is not None:
        sys.exit(f"stopped by {stopped_by}; the same command goes on")
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
