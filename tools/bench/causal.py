"""Causal models on one CPU thread beside Transformers' `Trainer`: tokens a second in interleaved rounds, losses step by
step.

    python tools/bench/causal.py --tokenizer TOKENIZER_FOLDER --corpus TEXT.jsonl.gz --turns TURNS.jsonl.gz

Same weights, float32, no dropout, AdamW with the same settings, clipping at 1. With `--corpus` (a field `text`) both
train on the same rows in the same order, blocks of the joined documents, at each of the lengths and accumulations asked
for; the losses of all their steps are compared. With `--turns` (fields `instruction`, `output`) the documents are
short: ours come packed, the peer's padded to the longest of their batch, as `DataCollatorForLanguageModeling` makes
them, about as many real tokens a step. A rate is tokens that are predicted per second of CPU time of the whole process.
Exits with 1 below a goal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import causal_peer
import numpy as np
import ours
import torch
import transformers
import turns
from torch.nn.utils.rnn import pad_sequence

from terakoya.config.parameters import Parameters
from terakoya.preparation.prepare import prepare
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.model.build import build_module

OURS = "terakoya"
PADDED, SORTED = "Trainer, padded", "Trainer, padded, grouped by length"
ROWS_GOAL, PADDED_GOAL = 1.0, 2.0
LOSS_GOAL = 1e-5


def main() -> int:
    """Prints rates, ratios and how far losses are apart. Returns the exit status."""
    arguments = _arguments()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(
        f"{arguments.type}, {arguments.layers} layers of {arguments.hidden_size}, {arguments.micro_tokens:,} tokens at "
        f"once; torch {torch.__version__}, transformers {transformers.__version__}, one thread"
    )
    good = True
    with tempfile.TemporaryDirectory() as folder:
        if arguments.corpus is not None:
            store = stored(texts(arguments.corpus), Path(folder) / "corpus", arguments)
            for length in arguments.sequence_length:
                for accumulation in arguments.accumulation:
                    good &= same_rows(store, length, accumulation, arguments)
        if arguments.turns is not None:
            store = stored(conversations(arguments.turns), Path(folder) / "turns", arguments)
            good &= short_documents(store, arguments)
    return int(not good)


def same_rows(store: TokenStore, length: int, accumulation: int, arguments: argparse.Namespace) -> bool:
    """Both on the same rows; prints and judges."""
    raw = parameters(store, "stream", length, accumulation, arguments)
    steps = max(1, arguments.steps // accumulation)
    contestants: dict[str, turns.Contestant] = {
        "Trainer": partial(causal_peer.train_rows, raw=raw, steps=steps),
        OURS: partial(ours.train, raw=raw, steps=steps),
    }
    print(f"\nsame rows of {length}, {raw['batch_size']['-1']} a step, accumulation {accumulation}")
    results = turns.race(contestants, arguments.rounds)
    apart = max(
        abs(mine.facts[name] - theirs.facts[name])
        for mine, theirs in zip(results[OURS], results["Trainer"], strict=True)
        for name in mine.facts
    )
    print(f"losses of {len(results[OURS][0].facts)} steps differ by at most {apart:.1e} (goal {LOSS_GOAL})")
    return verdict(results, {"Trainer": ROWS_GOAL}) and apart <= LOSS_GOAL


def short_documents(store: TokenStore, arguments: argparse.Namespace) -> bool:
    """Ours packed, the peer's padded; prints and judges."""
    length = arguments.turn_length
    raw = parameters(store, "packed", length, 1, arguments)
    documents = causal_peer.documents(store, longest=length)
    lengths = np.array([len(each) for each in documents])
    at_once = max(1, round(arguments.micro_tokens / (lengths.mean() - 1)))
    peer = partial(causal_peer.train_padded, raw=raw, documents_at_once=at_once, steps=arguments.padded_steps)
    contestants: dict[str, turns.Contestant] = {
        PADDED: peer,
        SORTED: partial(peer, train_sampling_strategy="group_by_length"),
        OURS: partial(ours.train, raw=raw, steps=arguments.steps),
    }
    print(
        f"\n{len(documents)} documents of {lengths.mean():.0f} tokens on average, median {np.median(lengths):.0f}, cut "
        f"at {length}; ours {raw['batch_size']['-1']} packed rows of {length} a step, the peer's {at_once} documents"
    )
    apart = packed_apart(raw, store)
    results = turns.race(contestants, arguments.rounds)
    return verdict(results, {PADDED: PADDED_GOAL}) and apart <= LOSS_GOAL


def packed_apart(raw: Mapping[str, Any], store: TokenStore) -> float:
    """How far the mean loss of one step's packed rows through our module is from that of the same documents, padded,
    through Transformers' model. Prints both, and how far the gradients are apart."""
    settings = Parameters.from_dict(raw, source="causal.py")
    source = RowSource(
        store, settings.objective.row_layout(), sequence_length=settings.data.sequence_length, seed=settings.seed
    )
    batch = settings.objective.collate(source.load(0, np.arange(raw["batch_size"]["-1"])), store.facts.vocabulary)
    module: Any = build_module(settings, store.facts.vocabulary)
    theirs: Any = causal_peer.model_of(settings, store)
    attention.use(module, "sdpa")
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    mine = module(arrays)["lm_loss"] / batch.counts["targets"]
    mine.backward()
    pieces = [
        tuple(arrays[name][row][arrays["document_ids"][row] == number] for name in ("input_ids", "labels"))
        for row in range(len(arrays["input_ids"]))
        for number in range(int(arrays["document_ids"][row].max()) + 1)
    ]
    ids = pad_sequence([piece for piece, _ in pieces], batch_first=True)
    labels = pad_sequence([label for _, label in pieces], batch_first=True, padding_value=-100)
    other = theirs(
        input_ids=ids, attention_mask=(labels != -100).long(), labels=labels, shift_labels=labels, use_cache=False
    ).loss
    other.backward()
    apart = max(
        float((one.grad - two.grad).norm() / two.grad.norm())
        for one, two in zip(module.model.parameters(), theirs.parameters(), strict=True)
        if two.grad.norm() > 1e-7
    )
    difference = abs(float(mine.detach()) - float(other.detach()))
    print(
        f"{len(pieces)} documents, {batch.counts['targets']} tokens: loss ours {float(mine.detach()):.7f}, "
        f"Transformers {float(other.detach()):.7f}, difference {difference:.1e} (goal {LOSS_GOAL}); gradients apart by "
        f"at most {apart:.1e} of their norm"
    )
    return difference


def verdict(results: Mapping[str, list[turns.Turn]], goals: Mapping[str, float]) -> bool:
    """Prints the ratios of medians over rounds, and of each round. Returns whether all goals are met."""
    good = True
    for name, each in results.items():
        if name == OURS:
            continue
        ratios = {clock: turns.median(results[OURS], clock) / turns.median(each, clock) for clock in ("cpu", "wall")}
        by_round = [mine.rate("cpu") / theirs.rate("cpu") for mine, theirs in zip(results[OURS], each, strict=True)]
        goal = goals.get(name)
        good &= goal is None or ratios["cpu"] >= goal
        print(
            f"{name}: {turns.median(each, 'cpu'):,.0f}, ours {turns.median(results[OURS], 'cpu'):,.0f} tokens per CPU "
            f"second: {ratios['cpu']:.2f} x" + (f" (goal {goal} x)" if goal else "")
            + f", by round {min(by_round):.2f} to {max(by_round):.2f}, by wall time {ratios['wall']:.2f} x"
        )  # fmt: skip
    return good


def parameters(
    store: TokenStore, layout: str, length: int, accumulation: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Our run; the peer takes model, rows and optimizer settings from it."""
    micro = max(1, arguments.micro_tokens // length)
    width = arguments.hidden_size
    of_type: Mapping[str, dict[str, Any]] = {
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "llama": {"intermediate_size": 8 * width // 3 // 16 * 16, "num_key_value_heads": width // 64},
    }
    return {
        "data": {"train": [{"store": str(store.folder)}], "sequence_length": length},
        "architecture": {
            "type": arguments.type, "hidden_size": width, "num_hidden_layers": arguments.layers,
            "num_attention_heads": width // 64, "max_position_embeddings": length, **of_type[arguments.type],
        },
        "objective": {"type": "causal_lm", "layout": layout},
        "optimizer": {"type": "adamw", "learning_rate": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "schedule": {"type": "constant", "warmup_steps": 0},
        "precision": "fp32",
        "batch_size": {"-1": micro * accumulation},
        "micro_batch_size": micro,
        "max_steps": 1,
        "checkpoint": {"model": "never"},
        "logging_steps": 1,
    }  # fmt: skip


def stored(documents: Iterator[str], folder: Path, arguments: argparse.Namespace) -> TokenStore:
    """A token store of the first `documents`, made as `terakoya prepare` makes it."""
    folder.mkdir()
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        for text in islice(documents, arguments.documents):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    prepare([folder / "text.jsonl"], tokenizer=arguments.tokenizer, out=folder / "store", processes=1)
    return TokenStore.open(folder / "store")


def texts(corpus: Path) -> Iterator[str]:
    """The field `text` of each line."""
    return (line["text"] for line in _lines(corpus))


def conversations(file: Path) -> Iterator[str]:
    """What was asked and what was answered, one document each."""
    return (f"{line['instruction']}\n{line['output']}" for line in _lines(file))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as opened:
        for line in opened:
            yield json.loads(line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Causal models beside Transformers' Trainer")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer's folder")
    parser.add_argument("--corpus", type=Path, help="jsonl[.gz] with a field text: both on the same rows")
    parser.add_argument("--turns", type=Path, help="jsonl[.gz] with fields instruction and output: packed and padded")
    parser.add_argument("--documents", type=int, default=2000, help="how many lines of each file are used")
    parser.add_argument("--type", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64, the size of a head")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, nargs="+", default=[256, 1024], help="of rows alike")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--turn-length", type=int, default=512, help="of packed rows; documents are cut there")
    parser.add_argument("--micro-tokens", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=4, help="timed micro-batches of a round, on rows alike and of ours"
    )
    parser.add_argument("--padded-steps", type=int, default=4, help="timed steps of the padded peer in a round")
    arguments = parser.parse_args()
    if arguments.corpus is None and arguments.turns is None:
        parser.error("nothing to compare: expected --corpus, --turns or both")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
