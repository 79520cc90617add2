"""Training throughput on one CPU thread: real tokens a second beside Transformers' `Trainer`, in one interleaved run.

    python tools/bench/training.py --corpus LINES.jsonl.gz --tokenizer TOKENIZER_FOLDER

BERT with 4 layers of 256, float32, no dropout, equal weights. The peer trains on lines padded to the longest of their
batch, and on lines joined and cut into blocks; ours on packed rows. Rates are real tokens (padding not counted) per
second of CPU time of the whole process, the thread that reads ahead included. Exits with 1 below a goal.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lines
import numpy as np
import ours
import peer
import torch
import transformers
import turns
from torch.nn.utils.rnn import pad_sequence
from transformers import BertForMaskedLM

from terakoya.components import Batch
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.model.build import build_module

OURS = "terakoya, packed rows"
GOALS = {"Trainer, padded lines": 8.0, "Trainer, joined blocks": 2.8}
LOSS_GOAL = 1e-5


def main() -> int:
    """Prints losses, rates and ratios. Returns the exit status."""
    arguments = _arguments()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    data = lines.read(
        arguments.corpus, arguments.tokenizer, count=arguments.lines, sequence_length=arguments.sequence_length
    )
    framed = data.framed()
    lengths = np.array([len(line) for line in framed])
    print(
        f"{len(framed)} lines of {arguments.corpus.name}, {lengths.mean():.1f} tokens on average, median "
        f"{np.median(lengths):.0f}; torch {torch.__version__}, transformers {transformers.__version__}, one thread"
    )
    with tempfile.TemporaryDirectory() as folder:
        store = data.store(Path(folder) / "store")
        raw = parameters(store, arguments)
        difference = same_losses(Parameters.from_dict(raw, source="training.py"), store)
        hf = partial(
            peer.train, raw=raw, vocabulary=data.vocabulary, tokenizer_folder=arguments.tokenizer,
            steps=arguments.peer_steps, use_cpu=True,
        )  # fmt: skip
        contestants: dict[str, turns.Contestant] = {
            "Trainer, padded lines": partial(hf, sequences=framed),
            "Trainer, joined blocks": partial(hf, sequences=peer.blocks(framed, arguments.sequence_length)),
        }
        if arguments.length_grouped:
            contestants["Trainer, lines grouped by length"] = partial(
                hf, sequences=framed, train_sampling_strategy="group_by_length"
            )
        contestants[OURS] = partial(ours.train, raw=raw, steps=arguments.steps)
        results = turns.race(contestants, arguments.rounds)
    return verdict(results, difference, GOALS)


def parameters(store: TokenStore, arguments: argparse.Namespace) -> dict[str, Any]:
    """Our run: the peer's model, batch size and optimizer settings."""
    return {
        "data": {"train": [{"store": str(store.folder)}], "sequence_length": arguments.sequence_length},
        "architecture": {
            "type": "bert", "hidden_size": arguments.hidden_size, "num_hidden_layers": arguments.layers,
            "num_attention_heads": 4, "intermediate_size": 4 * arguments.hidden_size,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        "objective": {"type": "masked_lm"},
        "optimizer": {"type": "adamw", "learning_rate": 5e-5, "weight_decay": 0.0},
        "schedule": {"type": "linear", "warmup_steps": 0},
        "precision": "fp32",
        "batch_size": {"-1": arguments.batch_size},
        "max_steps": arguments.steps,
        "checkpoint": {"model": "never"},
    }  # fmt: skip


def same_losses(parameters: Parameters, store: TokenStore) -> float:
    """The difference of the mean loss of masked tokens: packed through ours, padded through `BertForMaskedLM`.

    Same weights, sequences and masks. Prints both losses and how far the gradients are apart.
    """
    vocabulary: Vocabulary = store.facts.vocabulary
    objective = parameters.objective
    source = RowSource(
        store, objective.row_layout(), sequence_length=parameters.data.sequence_length, seed=parameters.seed
    )
    batch = objective.collate(source.load(0, np.arange(parameters.batch_size["-1"])), vocabulary)
    module = build_module(parameters, vocabulary)
    theirs: BertForMaskedLM = BertForMaskedLM(copy.deepcopy(module.model.config))
    theirs.load_state_dict(module.model.state_dict())
    attention.use(module, "sdpa")
    sums = module({name: torch.from_numpy(array) for name, array in batch.arrays.items()})
    our_loss = sums["mlm_loss"] / batch.counts["masked"]
    our_loss.backward()
    input_ids, mask, labels = unpacked(batch, vocabulary)
    their_loss = theirs(input_ids=input_ids, attention_mask=mask, labels=labels).loss
    their_loss.backward()
    apart = max(
        float((mine.grad - peers.grad).norm() / peers.grad.norm())
        for mine, peers in zip(module.model.parameters(), theirs.parameters(), strict=True)
        if peers.grad.norm() > 1e-7  # the key's bias has a gradient of zero but for rounding
    )
    our_loss, their_loss = our_loss.item(), their_loss.item()
    difference = abs(our_loss - their_loss)
    print(
        f"{len(input_ids)} sequences, {batch.counts['masked']} masked: loss ours {our_loss:.7f}, "
        f"BertForMaskedLM {their_loss:.7f}, difference {difference:.1e}; "
        f"gradients apart by at most {apart:.1e} of their norm"
    )
    return difference


def unpacked(batch: Batch, vocabulary: Vocabulary) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The documents of packed rows as padded sequences (S, T): ids, attention mask, labels with -100."""
    ids, documents = batch.arrays["input_ids"], batch.arrays["document_ids"]
    labels = np.full(ids.size, -100, np.int64)
    used = batch.arrays["masked_labels"] != -100
    labels[batch.arrays["masked_positions"][used]] = batch.arrays["masked_labels"][used]
    labels = labels.reshape(ids.shape)
    pieces = [
        (torch.from_numpy(ids[row][documents[row] == number]), torch.from_numpy(labels[row][documents[row] == number]))
        for row in range(len(ids))
        for number in range(int(documents[row].max()) + 1)
    ]
    lengths = torch.tensor([len(piece) for piece, _ in pieces])
    assert vocabulary.pad is not None
    padded = pad_sequence([piece for piece, _ in pieces], batch_first=True, padding_value=vocabulary.pad)
    mask = (torch.arange(padded.shape[1])[None, :] < lengths[:, None]).long()
    return padded, mask, pad_sequence([label for _, label in pieces], batch_first=True, padding_value=-100)


def verdict(results: Mapping[str, list[turns.Turn]], difference: float, goals: Mapping[str, float]) -> int:
    """Prints the ratios of medians over rounds. Returns 1 if a goal was missed, else 0."""
    medians = {name: turns.median(each, "cpu") for name, each in results.items()}
    rate = medians.pop(OURS)
    print(f"\n{OURS}: {rate:,.0f} tokens per CPU second")
    failed = difference > LOSS_GOAL
    for name, theirs in medians.items():
        goal = goals.get(name)
        failed |= goal is not None and rate / theirs < goal
        wall = turns.median(results[OURS], "wall") / turns.median(results[name], "wall")
        print(
            f"{name}: {theirs:,.0f}; ours {rate / theirs:.2f} x"
            + (f" (goal {goal} x)" if goal else "")
            + f", by wall time {wall:.2f} x"
        )
    print(f"losses differ by at most {difference:.1e} (goal {LOSS_GOAL})")
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl[.gz] with a field text, or lines of text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer's folder")
    parser.add_argument("--lines", type=int, default=6000, help="how many lines are drawn")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of ours in a round")
    parser.add_argument("--peer-steps", type=int, default=3, help="timed steps of each peer in a round")
    parser.add_argument("--length-grouped", action="store_true", help="also the peer with sequences of like length")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
