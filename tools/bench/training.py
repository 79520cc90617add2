"""Training throughput on one CPU thread: real tokens a second beside Transformers' `Trainer`, in one interleaved run.

    python tools/bench/training.py --corpus LINES.jsonl.gz --tokenizer TOKENIZER_FOLDER

BERT with 4 layers of 256, float32, no dropout, equal weights. The peer trains on lines padded to the longest of their
batch, and on lines joined and cut into blocks; ours on packed rows. Rates are real tokens (padding not counted) per
second of CPU time of the whole process, the thread that reads ahead included. Exits with 1 below a goal.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lines
import numpy as np
import peer
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import BertForMaskedLM

from terakoya import attention, plugins
from terakoya.components import Batch
from terakoya.data.rows import RowSource
from terakoya.data.store import TokenStore
from terakoya.data.vocab import Vocabulary
from terakoya.parameters import Parameters
from terakoya.training.setup import build_module, train_here

GOALS = {"Trainer, lines": 8.0, "Trainer, blocks": 2.8}
LOSS_GOAL = 1e-5


def main() -> int:
    """Prints losses, rates and ratios. Returns the exit status."""
    arguments = _arguments()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("terakoya").setLevel(logging.WARNING)
    data = lines.read(
        arguments.corpus, arguments.tokenizer, count=arguments.lines, sequence_length=arguments.sequence_length
    )
    framed = data.framed()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = data.store(folder / "store")
        ours = run_parameters(store, arguments)
        lengths = np.array([len(line) for line in framed])
        print(
            f"{len(framed)} lines of {arguments.corpus.name}, {lengths.mean():.1f} tokens on average, median "
            f"{np.median(lengths):.0f}; torch {torch.__version__}, transformers {transformers.__version__}, one thread"
        )
        module = build_module(ours, data.vocabulary)
        difference = same_losses(ours, module, store)
        blocks = peer.blocks(framed, arguments.sequence_length)
        contestants: dict[str, Callable[[int], list[peer.Step]]] = {}

        def hf(sequences: Sequence[Sequence[int]], **more: str) -> Callable[[int], list[peer.Step]]:
            return lambda seed: peer.train(
                module.model, data.tokenizer, sequences, batch_size=arguments.batch_size, steps=arguments.peer_steps,
                seed=seed, use_cpu=True, **more,
            )  # fmt: skip

        contestants["Trainer, lines"] = hf(framed)
        contestants["Trainer, blocks"] = hf(blocks)
        if arguments.length_grouped:
            contestants["Trainer, lines grouped by length"] = hf(framed, train_sampling_strategy="group_by_length")
        contestants["terakoya, packed"] = lambda seed: train_ours(ours, folder / f"run-{seed}")
        rates = interleave(contestants, arguments.rounds)
    return verdict(rates, difference)


def run_parameters(store: TokenStore, arguments: argparse.Namespace) -> Parameters:
    """Our run: the peer's model, batch size and optimizer settings."""
    raw = {
        "data": {"train": [{"store": str(store.folder)}], "sequence_length": arguments.sequence_length},
        "architecture": {
            "type": "bert", "hidden_size": arguments.hidden_size, "num_hidden_layers": arguments.layers,
            "num_attention_heads": 4, "intermediate_size": 4 * arguments.hidden_size,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        "objective": {"type": "masked_lm"},
        "optimizer": {"type": "adamw", "learning_rate": 5e-5, "weight_decay": 0.0},
        "schedule": {"type": "linear", "warmup_steps": 0},
        "batch_size": {"-1": arguments.batch_size},
        "max_steps": arguments.steps + 1,
        "checkpoint": {"model": "never"},
    }  # fmt: skip
    return Parameters.from_dict(raw, source="training.py")


def train_ours(parameters: Parameters, folder: Path) -> list[peer.Step]:
    """Trains in `folder` as `terakoya train` does. Returns the steps but the first, timed by a plugin."""
    registry = plugins.load([str(Path(__file__).with_name("step_clock.py"))])
    clock = next(each.module for each in registry.plugins if hasattr(each.module, "ended"))
    clock.ended.clear()
    train_here(parameters, folder)
    return peer.differences([each[1:] for each in clock.ended], [each[0] for each in clock.ended])


def same_losses(parameters: Parameters, module: torch.nn.Module, store: TokenStore) -> float:
    """The difference of the mean loss of masked tokens: packed through ours, padded through `BertForMaskedLM`.

    Same weights, sequences and masks. Prints both losses and how far the gradients are apart.
    """
    vocabulary: Vocabulary = store.facts.vocabulary
    objective = parameters.objective
    source = RowSource(
        store, objective.row_layout(), sequence_length=parameters.data.sequence_length, seed=parameters.seed
    )
    batch = objective.collate(source.load(0, np.arange(parameters.batch_size["-1"])), vocabulary)
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
        float((ours.grad - peers.grad).norm() / peers.grad.norm())
        for ours, peers in zip(module.model.parameters(), theirs.parameters(), strict=True)
        if peers.grad.norm() > 1e-7  # the key's bias has a gradient of zero but for rounding
    )
    module.zero_grad()
    attention.release(module.model)
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


def interleave(contestants: dict[str, Callable[[int], list[peer.Step]]], rounds: int) -> dict[str, list[float]]:
    """Each contestant in turn, `rounds` times. Prints and returns its rate in each round, tokens per CPU second."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, run in contestants.items():
            steps = run(number)
            tokens, wall, cpu = (sum(step[index] for step in steps) for index in range(3))
            rates[name].append(tokens / cpu)
            print(
                f"round {number + 1}  {name:34} {len(steps)} steps, {tokens:6,} tokens: "
                f"{tokens / cpu:8,.0f} tokens per CPU second, {tokens / wall:8,.0f} per second of wall time",
                flush=True,
            )
    return rates


def verdict(rates: dict[str, list[float]], difference: float) -> int:
    """Prints the ratios of medians. Returns 1 if a goal was missed, else 0."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ours = medians.pop("terakoya, packed")
    print(f"\nterakoya, packed: {ours:,.0f} tokens/s")
    failed = difference > LOSS_GOAL
    for name, rate in medians.items():
        goal = GOALS.get(name)
        failed |= goal is not None and ours / rate < goal
        print(f"{name}: {rate:,.0f} tokens/s, ours {ours / rate:.2f} x" + (f" (goal {goal} x)" if goal else ""))
    print(f"losses differ by {difference:.1e} (goal {LOSS_GOAL})")
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
    parser.add_argument("--steps", type=int, default=4, help="timed steps of ours in a round")
    parser.add_argument("--peer-steps", type=int, default=2, help="timed steps of each peer in a round")
    parser.add_argument("--length-grouped", action="store_true", help="also the peer with sequences of like length")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
