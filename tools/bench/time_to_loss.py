"""Seconds until a validation loss: Transformers' `Trainer` with its usual recipe beside terakoya with its preset.

    python tools/bench/time_to_loss.py --family bert --store STORE --validation VALIDATION_STORE --curves FOLDER

Both begin with random weights, read the same text through the same tokenizer, have nearly as many parameters and are
measured on the same documents with the same masks. The peer does what Transformers' `run_mlm.py` and `run_clm.py` do:
documents joined and cut into blocks, logits at every position, AdamW with a linear schedule, dropout 0.1. Ours is the
recipe of the preset `bert_ja` or `gpt_ja` at the size asked for. The legs take turns; each curve is kept as JSON.
Seconds are those of training alone, without start and validations. Exits with 1 where a leg never reaches the target.

With `--family electra --jsts FOLDER` the peer is `ElectraForMaskedLM` and `ElectraForPreTraining`, ours `electra_ja`,
and seconds are those until a score: each leg's discriminators are kept at every validation, and each is fine-tuned on
JSTS by plain Transformers, alike for both. The discriminator of step 0 has random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import discriminators
import loss_clock
import numpy as np
import torch
import transformers
import turns
from loss_clock import Curve, Point
from peer import Sequences, blocks
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from terakoya import plugins
from terakoya.config.parameters import Parameters
from terakoya.config.presets import find_parameters
from terakoya.rows.stores import validation_rows
from terakoya.store.token_store import TokenStore
from terakoya.training.setup import train_in_this_process

Batches = list[dict[str, torch.Tensor]]
MASKING: dict[str, dict[str, Any]] = {
    "bert": {"mlm_probability": 0.15},
    "gpt": {"mlm": False},
    "electra": {"mlm_probability": 0.15, "mask_replace_prob": 0.85, "random_replace_prob": 0.0},
}
"""How the peer's rows are masked; ELECTRA's as in the paper's code."""
PRESETS = {"bert": "bert_ja", "gpt": "gpt_ja", "electra": "electra_ja"}


def main(argv: list[str] | None = None) -> int:
    """Prints the legs and the ratio. Returns the exit status."""
    arguments = _arguments(argv)
    raw = ours(arguments)
    contestants: dict[str, turns.Contestant] = {
        "Trainer": partial(train_peer, raw=raw, settings=vars(arguments)),
        "terakoya": partial(train_ours, raw=raw),
    }
    measure = "loss"
    if arguments.family == "electra":
        measure = "accuracy"
        contestants = {name: partial(each, kept=arguments.curves / name) for name, each in contestants.items()}
    curves: dict[str, list[list[Point]]] = {name: [] for name in contestants}
    for number, name, turn in turns.interleave(contestants, arguments.rounds):
        points: list[Point] = turn.facts["points"]  # type: ignore[assignment]
        if arguments.family == "electra":
            score(points, arguments.curves / name / str(number), arguments)
        curves[name].append(points)
        arguments.curves.mkdir(parents=True, exist_ok=True)
        kept = {"leg": name, "round": number, "parameters": turn.facts["parameters"], "points": points}
        path = arguments.curves / f"{arguments.family}-{name}-{number}.json"
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(
            f"round {number + 1}  {name}, {turn.facts['parameters']:,.0f} parameters:", *map(_shown, points), sep="\n  "
        )
    return verdict(curves, arguments.target, measure)


def score(points: list[Point], folder: Path, arguments: argparse.Namespace) -> None:
    """Sets the accuracy of each point to the score of the discriminator that was kept there, the mean over seeds."""
    torch.set_num_threads(1)
    tuning = discriminators.Tuning(
        learning_rate=arguments.tuning_learning_rate, epochs=arguments.tuning_epochs, pairs=arguments.tuning_pairs
    )
    tokenizer = TokenStore.open(arguments.store).tokenizer_folder
    for point in points:
        kept = folder / f"step-{point['step']}"
        found = [discriminators.score(kept, tokenizer, arguments.jsts, tuning, seed) for seed in arguments.tuning_seeds]
        print(f"  {kept}:", *(f"{each:.3f}" for each in found), flush=True)
        point["accuracy"] = sum(found) / len(found)


def verdict(curves: Mapping[str, list[list[Point]]], target: float | None, measure: str = "loss") -> int:
    """Prints how long each leg took to `target`, by default the peer's best loss of all rounds, or its best score with
    `measure="accuracy"`, and the ratio of each round. Returns 1 if a leg never reached it, else 0."""
    if target is None:
        best, of_rounds = (min, max) if measure == "loss" else (max, min)
        target = of_rounds(best(dict(point)[measure] for point in points) for points in curves["Trainer"])  # type: ignore[type-var]
    missed = 0
    for number, (theirs, mine) in enumerate(zip(curves["Trainer"], curves["terakoya"], strict=True), start=1):
        line = f"round {number}, {measure} {target:.3f}"
        for clock in ("cpu", "wall"):
            seconds = [loss_clock.reached(points, target, clock, measure) for points in (theirs, mine)]
            shown = [
                f"{each:,.1f} s" if each is not None else f"not within {points[-1][clock]:,.0f} s"  # type: ignore[literal-required]
                for each, points in zip(seconds, (theirs, mine), strict=True)
            ]
            line += f"; {clock}: Trainer {shown[0]}, terakoya {shown[1]}"
            missed |= None in seconds
            if seconds[1]:
                line += f", {'' if seconds[0] else 'more than '}{(seconds[0] or theirs[-1][clock]) / seconds[1]:.1f} x"  # type: ignore[literal-required]
        print(line)
    return int(missed)


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """The preset's recipe with the stores, the size and the number of steps asked for."""
    raw = json.loads(find_parameters(arguments.preset or PRESETS[arguments.family]).read_text(encoding="utf-8"))
    raw["data"] = {
        "train": [{"store": str(arguments.store)}],
        "validation": [str(arguments.validation)],
        "sequence_length": arguments.sequence_length,
    }
    if generator := raw["objective"].get("generator"):
        share = generator["num_hidden_layers"] / raw["architecture"]["num_hidden_layers"]
        layers = max(2, round(share * arguments.layers))  # the first sees the whole document, the second its neighbours
        _resize(generator, arguments, layers=min(layers, arguments.layers))
    _resize(raw["architecture"], arguments, layers=arguments.layers)
    if raw["objective"]["type"] == "masked_lm":
        raw["objective"]["whole_word_mask"] = False  # the peer masks single tokens: both learn its task
    every = max(1, arguments.steps // arguments.points)
    raw.update(
        batch_size={"-1": arguments.batch_size},
        micro_batch_size=None,
        max_steps=arguments.steps,
        precision="fp32",
        logging_steps=every,
        checkpoint={"model": "never"},
        evaluation={"steps": every, "batches": -(-arguments.validation_rows // arguments.batch_size)},
        trackers=[],
    )
    raw["schedule"]["warmup_steps"] = max(1, arguments.steps // 15)
    for change in arguments.set:
        place, _, value = change.partition("=")
        *sections, last = place.split(".")
        section = raw
        for name in sections:
            section = section[name]
        section[last] = json.loads(value)
    return raw


def _resize(architecture: dict[str, Any], arguments: argparse.Namespace, *, layers: int) -> None:
    width = arguments.hidden_size
    architecture.update(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=arguments.sequence_length,
    )
    gated = architecture["type"] in ("modernbert", "llama")  # three matrices instead of two: two thirds of the width
    if architecture["type"] != "gpt2":
        architecture["intermediate_size"] = 8 * width // 3 // 16 * 16 if gated else 4 * width
    if architecture["type"] == "llama":
        architecture["num_key_value_heads"] = width // 32


def train_ours(number: int, raw: Mapping[str, Any], kept: Path | None = None) -> turns.Turn:
    """Trains with the parameters `raw`, as `terakoya train` does. The facts hold the curve and the parameter count.
    Discriminators are saved in a folder of `kept` for the round."""
    torch.set_num_threads(1)
    plugin = Path(loss_clock.__file__)
    clock = next(each.module for each in plugins.load([str(plugin)]).plugins if each.module.__file__ == str(plugin))
    clock.curve, clock.discriminators = Curve(), kept and kept / str(number)
    parameters = Parameters.from_dict(dict(raw), source="time_to_loss.py")
    with tempfile.TemporaryDirectory() as folder, Path(folder, "screen").open("w") as screen:
        with contextlib.redirect_stderr(screen):
            train_in_this_process(parameters, Path(folder) / "run")
        records = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    count = next(record["parameter_count"] for record in map(json.loads, records) if record["kind"] == "start")
    points, clock.curve, clock.discriminators = clock.curve.points, None, None
    return turns.Turn([], {"points": points, "parameters": count})


def train_peer(
    number: int, raw: Mapping[str, Any], settings: Mapping[str, Any], kept: Path | None = None
) -> turns.Turn:
    """Trains Transformers' model with `Trainer`; `number` is its seed. The facts hold the curve and the parameter
    count. Discriminators are saved in a folder of `kept` for the round."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    transformers.logging.set_verbosity_error()
    store = TokenStore.open(settings["store"])
    tokenizer = AutoTokenizer.from_pretrained(store.tokenizer_folder, local_files_only=True, trust_remote_code=False)
    model = peer_model(len(tokenizer), settings)
    curve = Curve()
    batches = validation_batches(raw)
    callback = Measure(curve, model, batches, max(1, settings["peer_steps"] // settings["points"]))
    callback.discriminators = kept and kept / str(number)
    masking = DataCollatorForLanguageModeling(tokenizer, **MASKING[settings["family"]])
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            folder,
            per_device_train_batch_size=settings["peer_batch_size"],
            max_steps=settings["peer_steps"],
            learning_rate=settings["peer_learning_rate"],
            warmup_steps=settings["peer_steps"] // 15,
            weight_decay=0.01,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=number,
        )
        rows = blocks(documents(store), settings["sequence_length"])
        callback.tokens = settings["peer_batch_size"] * settings["sequence_length"]
        trainer = Trainer(model, training, masking, Sequences(rows), callbacks=[callback])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    count = sum(weights.numel() for weights in model.parameters())
    return turns.Turn([], {"points": curve.points, "parameters": count})  # type: ignore[dict-item]


def peer_model(vocabulary_size: int, settings: Mapping[str, Any]) -> PreTrainedModel | discriminators.Peer:
    """A model of Transformers with random weights and its own defaults, dropout 0.1 among them."""
    width, length = settings["hidden_size"], settings["sequence_length"]
    if settings["family"] == "electra":
        return discriminators.peer_model(vocabulary_size, settings)
    if settings["family"] == "bert":
        return BertForMaskedLM(
            BertConfig(
                vocab_size=vocabulary_size, hidden_size=width, num_hidden_layers=settings["layers"],
                num_attention_heads=width // 32, intermediate_size=4 * width, max_position_embeddings=length,
            )
        )  # fmt: skip
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary_size, n_embd=width, n_layer=settings["layers"], n_head=width // 32, n_positions=length
        )
    )


def documents(store: TokenStore) -> list[list[int]]:
    """Each document's ids between the tokens that begin and end a text."""
    vocabulary = store.facts.vocabulary
    first = [] if vocabulary.cls is None else [vocabulary.cls]
    last = vocabulary.sep if vocabulary.sep is not None else vocabulary.end
    assert last is not None
    offsets = store.offsets[store.documents]
    return [[*first, *store.tokens[start:stop].tolist(), last] for start, stop in pairwise(offsets.tolist())]


def validation_batches(raw: Mapping[str, Any]) -> Batches:
    """What our run with the parameters `raw` is validated on, each document of its rows as a padded sequence: ids,
    attention mask and labels, not shifted, (S, T)."""
    parameters = Parameters.from_dict(dict(raw), source="time_to_loss.py")
    store = TokenStore.open(parameters.data.validation[0])
    objective, size = parameters.objective, parameters.batch_size["-1"]
    source = validation_rows(
        store, objective.row_layout(), sequence_length=parameters.data.sequence_length, seed=parameters.seed
    )
    count = min(len(source), size * parameters.evaluation.batches)
    batches = []
    for start in range(0, count, size):
        batch = objective.collate(source.load(0, source.spread(count)[start : start + size]), store.facts.vocabulary)
        batches.append(_unpacked(batch.arrays))
    return batches


def _unpacked(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    ids, numbers = arrays["input_ids"], arrays["document_ids"]
    if "labels" in arrays:
        labels = arrays["labels"]
    else:
        flat, used = np.full(ids.size, -100, np.int64), arrays["masked_labels"] != -100
        flat[arrays["masked_positions"][used]] = arrays["masked_labels"][used]
        labels = flat.reshape(ids.shape)
    pieces = [
        tuple(torch.from_numpy(array[row][numbers[row] == number]) for array in (ids, labels))
        for row in range(len(ids))
        for number in range(int(numbers[row].max()) + 1)
    ]
    lengths = torch.tensor([len(piece) for piece, _ in pieces])
    padded = pad_sequence([piece for piece, _ in pieces], batch_first=True)
    return {
        "input_ids": padded,
        "attention_mask": (torch.arange(padded.shape[1])[None, :] < lengths[:, None]).long(),
        "labels": pad_sequence([label for _, label in pieces], batch_first=True, padding_value=-100),
    }


@torch.no_grad()
def measure(model: PreTrainedModel | discriminators.Peer, batches: Batches) -> tuple[float, float]:
    """Returns the mean loss of all predicted tokens and the share that is predicted correctly; of ELECTRA, the
    discriminator's loss and 0."""
    if isinstance(model, discriminators.Peer):
        return discriminators.measure(model, batches), 0.0
    model.eval()
    loss = right = count = 0.0
    for batch in batches:
        wanted = batch["labels"] != -100
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[wanted]
        labels = batch["labels"][wanted]
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        right += float((logits.argmax(-1) == labels).sum())
        count += len(labels)
    model.train()
    return loss / count, right / count


class Measure(TrainerCallback):
    """Measures before the first step and every `every` steps."""

    tokens = 0
    """Tokens of a step."""
    discriminators: Path | None = None
    """Where ELECTRA's discriminator is saved at each validation, by its step."""

    def __init__(
        self, curve: Curve, model: PreTrainedModel | discriminators.Peer, batches: Batches, every: int
    ) -> None:
        self.curve, self.model, self.batches, self.every = curve, model, batches, every

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._validate()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.curve.step_ended(self.tokens)
        if self.curve.step % self.every == 0:
            self._validate()

    def _validate(self) -> None:
        if self.discriminators is not None:
            self.model.discriminator.save_pretrained(self.discriminators / f"step-{self.curve.step}")
        self.curve.validated(*measure(self.model, self.batches))


def _shown(point: Point) -> str:
    return (
        f"step {point['step']:6,} {point['tokens']:10,} tokens {point['cpu']:7,.1f} CPU s {point['wall']:7,.1f} s  "
        f"loss {point['loss']:.3f}  accuracy {point['accuracy']:.1%}"
    )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--family", choices=list(PRESETS), required=True)
    parser.add_argument("--store", type=Path, required=True, help="what `terakoya prepare` wrote of the text to learn")
    parser.add_argument("--validation", type=Path, required=True, help="a store of other documents, same tokenizer")
    parser.add_argument("--curves", type=Path, required=True, help="the folder for one JSON file of each leg")
    parser.add_argument("--preset", help="whose recipe ours follows (default: bert_ja, gpt_ja, electra_ja)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="changes a key of the recipe")
    parser.add_argument("--target", type=float, help="the validation loss (default: the peer's best)")
    parser.add_argument("--steps", type=int, default=600, help="steps of ours")
    parser.add_argument("--peer-steps", type=int, default=1000)
    parser.add_argument("--peer-learning-rate", type=float, default=1e-3)
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 32, the size of a head")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step of ours")
    parser.add_argument("--peer-batch-size", type=int, default=32)
    parser.add_argument("--validation-rows", type=int, default=128)
    parser.add_argument("--points", type=int, default=20, help="validations of a leg")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jsts", type=Path, help="the folder of JSTS's gzipped files, for ELECTRA")
    parser.add_argument("--tuning-pairs", type=int, default=4000, help="training pairs of JSTS")
    parser.add_argument("--tuning-epochs", type=float, default=3)
    parser.add_argument("--tuning-learning-rate", type=float, default=1e-3)
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=[1, 2])
    tiny = parser.add_argument("--tiny", action="store_true", help="two steps of one layer: that it runs, not a figure")
    arguments = parser.parse_args(argv)
    if getattr(arguments, tiny.dest):
        arguments.steps = arguments.peer_steps = arguments.points = 2
        arguments.hidden_size, arguments.layers, arguments.sequence_length = 32, 1, 32
        arguments.batch_size, arguments.peer_batch_size, arguments.validation_rows = 4, 4, 8
        arguments.tuning_pairs, arguments.tuning_epochs, arguments.tuning_seeds = 8, 1, [1]
    if arguments.family == "electra" and arguments.jsts is None:
        parser.error("--family electra needs --jsts, the folder with train-v1.3.json.gz and valid-v1.3.json.gz")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
