"""Training throughput on a CUDA GPU: tokens/s, MFU and peak memory beside Transformers' `Trainer`, in one run.

    python tools/bench/gpu.py --model bert_base [--corpus LINES.jsonl.gz --tokenizer TOKENIZER_FOLDER]

Sequence length 512, bfloat16, no attention dropout. Ours trains on packed documents, the peer on documents
joined and cut into blocks (nothing padded) and on documents padded to the longest of their batch. For ELECTRA, which
`Trainer` does not know, the peer is the plain loop of electra.py. Our steps run with
`torch.cuda.set_sync_debug_mode("error")`: a step that waits for the device, other than a logged one, ends the run.
Without a corpus documents are random ids with lengths like those of an encyclopaedia. `--tiny` runs the whole script
on a CPU, to test it.

MFU counts useful work only, the same for both sides: per real token F = 6 P_block + 12 L h s + 6 f P_head, with
s = sum l^2 / sum l over documents, f the masked share, P_head = h^2 + h V at masked positions only; over the device's
dense bf16 peak. Padding, logits that no loss needs and attention across documents are not work. ELECTRA's F is that of
both models: the generator's head at masked positions, the discriminator's at all.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import electra
import lines
import numpy as np
import ours
import peer
import torch
import transformers
import turns
from step_clock import Clock

from terakoya.training.throughput import peak_tflops

MODELS: Mapping[str, dict[str, int]] = {
    "bert_base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bert_large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "electra_small": {
        "embedding_size": 128, "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "electra_base": {
        "embedding_size": 768, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}  # fmt: skip
GENERATORS = {"electra_small": "1/4", "electra_base": "1/3"}
TINY = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 192}
MASKED = 0.15
LOGGING_STEPS = 1_000_000


def main() -> int:
    """Prints a table. Returns the exit status."""
    arguments = _arguments()
    if not arguments.tiny and not torch.cuda.is_available():
        print("gpu.py: no CUDA device here; --tiny tests the script on a CPU", file=sys.stderr)
        return 2
    model = {**MODELS[arguments.model], **(TINY if arguments.tiny else {})}
    generator = GENERATORS.get(arguments.model)
    length = 64 if arguments.tiny else arguments.sequence_length
    batch_size = 8 if arguments.tiny else arguments.batch_size
    steps, warm_up = (3, 1) if arguments.tiny else (arguments.steps, arguments.warm_up)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = documents(arguments, folder, length)
        framed = data.framed()
        sizes = np.array([len(each) for each in framed], dtype=np.float64)
        span = float((sizes**2).sum() / sizes.sum())
        raw = parameters(
            data.store(folder / "store").folder,
            model,
            generator,
            length,
            batch_size,
            arguments.micro_batch_size,
            arguments.compile,
        )
        common = {"raw": raw, "vocabulary": data.vocabulary, "steps": steps, "warm_up": warm_up, "bf16": True}
        if generator:
            name = "plain"
            place = "cpu" if arguments.tiny else "cuda"
            hf = partial(electra.train_plain, sampling="gumbel", device=place, **common)
        else:
            name = "Trainer"
            hf = partial(peer.train, tokenizer_folder=data.tokenizer_folder, use_cpu=arguments.tiny, **common)
        contestants: dict[str, turns.Contestant] = {
            f"{name}, joined blocks": partial(train_peer, train=hf, sequences=peer.blocks(framed, length)),
            f"{name}, padded documents": partial(train_peer, train=hf, sequences=framed),
            "terakoya, packed": partial(train_ours, raw=raw, steps=steps, warm_up=warm_up),
        }
        flops = flops_per_token(model, generator, data.vocabulary.size, span)
        peak = peak_tflops(device)
        print(
            f"{device}, torch {torch.__version__}, transformers {transformers.__version__}; "
            f"{'tiny ' * arguments.tiny}{arguments.model}, sequence length {length}, {batch_size} rows a step; "
            f"{len(framed)} documents of {sizes.mean():.0f} tokens, s = {span:.0f}, {flops / 1e9:.3f} GFLOP a token"
        )
        results: dict[str, list[turns.Turn]] = {name: [] for name in contestants}
        for _, name, turn in turns.interleave(contestants, 1 if arguments.tiny else arguments.rounds):
            results[name].append(turn)
        for name, each in results.items():
            rate = turns.median(each, "wall")
            mfu = (
                f"MFU {100 * rate * flops / (1e12 * peak):5.1f} %" if peak else "MFU unknown (no peak for this device)"
            )
            memory = max(turn.facts["gibibytes"] for turn in each)
            print(f"{name:26} {rate:12,.0f} tokens/s, {mfu}, peak memory {memory:.1f} GiB")
    if torch.cuda.is_available():
        print("no step of ours waited for the device")
    return 0


def flops_per_token(model: Mapping[str, int], generator: str | None, vocabulary_size: int, span: float) -> float:
    """Forward and backward FLOP of one real token; see the top of this file."""
    hidden = model["hidden_size"]
    if generator is None:
        return _body(model, 1, span) + 6 * MASKED * (hidden**2 + hidden * vocabulary_size)
    embedding, share = model["embedding_size"], Fraction(generator)
    small = int(hidden * share)
    projections = sum(embedding * width for width in (small, hidden) if width != embedding)
    heads = MASKED * (small * embedding + embedding * vocabulary_size) + hidden**2 + hidden
    return _body(model, 1, span) + _body(model, share, span) + 6 * (projections + heads)


def _body(model: Mapping[str, int], share: Fraction | int, span: float) -> float:
    """FLOP of the layers, `share` as wide as `model`."""
    layers, hidden = model["num_hidden_layers"], float(model["hidden_size"] * share)
    block = layers * (4 * hidden**2 + 2 * hidden * float(model["intermediate_size"] * share))
    return 6 * block + 12 * layers * hidden * span


def documents(arguments: argparse.Namespace, folder: Path, length: int) -> lines.Lines:
    """Documents of the corpus, or drawn ones where there is none."""
    count = 400 if arguments.tiny else arguments.documents
    if arguments.corpus is None:
        return lines.drawn(
            folder / "tokenizer", count=count, mean_length=length // 2, sequence_length=length,
            vocabulary_size=1000 if arguments.tiny else 32768,
        )  # fmt: skip
    return lines.read(arguments.corpus, arguments.tokenizer, count=count, sequence_length=length, whole=True)


def parameters(
    store: Path,
    model: Mapping[str, int],
    generator: str | None,
    length: int,
    batch_size: int,
    micro_batch_size: int | None,
    compiled: str,
) -> dict[str, Any]:
    """Our run; the peer takes model and batch size from it."""
    objective = {"type": "replaced_token", "generator_size": generator} if generator else {"type": "masked_lm"}
    return {
        "data": {"train": [{"store": str(store)}], "sequence_length": length},
        "architecture": {"type": "electra" if generator else "bert", **model, "attention_probs_dropout_prob": 0.0},
        "objective": {**objective, "mlm_probability": MASKED},
        "optimizer": {"type": "adamw", "learning_rate": 5e-5, "weight_decay": 0.0},
        "schedule": {"type": "linear", "warmup_steps": 0},
        "batch_size": {"-1": batch_size},
        "micro_batch_size": micro_batch_size,
        "max_steps": 1,
        "precision": "bf16",
        "compile": compiled,
        "checkpoint": {"model": "never", "save_steps": LOGGING_STEPS},
        "logging_steps": LOGGING_STEPS,
    }


class WatchfulClock(Clock):
    """Makes a step that waits for the device an error, beside the first and the last, which are logged."""

    def step_ended(self) -> None:
        """Notes the step; the next one may wait only if it is the last."""
        super().step_ended()
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default" if len(self.ended) >= self.steps - 1 else "error")


def train_ours(_: int, raw: Mapping[str, Any], *, steps: int, warm_up: int) -> turns.Turn:
    """Our run; every step that is not logged may not wait for the device."""
    clock = WatchfulClock(warm_up=warm_up, steps=steps)
    tokens, _losses = ours.run(raw, clock.steps, clock)
    timed = zip(tokens[warm_up:], clock.differences(), strict=True)
    return _with_memory(turns.Turn([turns.Step(count, *seconds) for count, seconds in timed], {}))


def train_peer(number: int, *, train: Any, sequences: Sequence[Sequence[int]]) -> turns.Turn:
    """The peer on `sequences`."""
    return _with_memory(train(number, sequences=sequences))


def _with_memory(turn: turns.Turn) -> turns.Turn:
    """Adds the most GPU memory that tensors of this process ever took; gives the rest back to the other processes."""
    used = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return turns.Turn(turn.steps, {"gibibytes": used / 2**30})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(MODELS), default="bert_base")
    parser.add_argument("--corpus", type=Path, help="jsonl[.gz] with a field text; without it, random ids")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's folder, for the corpus")
    parser.add_argument("--documents", type=int, default=20_000, help="how many documents are used")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a step")
    parser.add_argument("--micro-batch-size", type=int, help="rows of ours at once; default all")
    parser.add_argument("--compile", choices=["auto", "blocks", "whole", "off"], default="auto", help="ours")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of a round")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: a test of this script")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
