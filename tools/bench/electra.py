"""ELECTRA's training throughput on one CPU thread: real tokens a second beside plain Transformers models.

    python tools/bench/electra.py --corpus LINES.jsonl.gz --tokenizer TOKENIZER_FOLDER

ELECTRA-small's widths at toy depth, float32, no dropout, equal weights, embeddings tied. The peer is what one writes
with `ElectraForMaskedLM` and `ElectraForPreTraining`: vocabulary logits at every position, tokens drawn with Gumbel
noise (or `torch.multinomial`), rows padded to the longest line of their batch, or lines joined and cut into blocks.
Rates are real tokens (padding not counted) per second of CPU time of the whole process. Exits with 1 below a goal.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
from step_clock import Clock
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from training import OURS, unpacked, verdict
from transformers import ElectraForMaskedLM, ElectraForPreTraining

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.model.build import build_module

GOALS = {"plain, padded lines": 2.5}
GENERATOR_WEIGHT, DISCRIMINATOR_WEIGHT = 1.0, 50.0


class Plain(nn.Module):
    """The paper written down with Transformers' classes, as most of the field's repositories do."""

    def __init__(self, generator: ElectraForMaskedLM, discriminator: ElectraForPreTraining, sampling: str) -> None:
        super().__init__()
        self.generator, self.discriminator, self.sampling = generator, discriminator, sampling
        discriminator.electra.embeddings = generator.electra.embeddings

    def forward(
        self, input_ids: Tensor, present: Tensor, labels: Tensor, sampled: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both mean losses of `input_ids` (B, T), `labels` (B, T) being -100 where nothing is masked; `sampled` (n,) in
        place of tokens drawn."""
        result = self.generator(input_ids=input_ids, attention_mask=present, labels=labels)
        masked = labels != -100
        with torch.no_grad():
            logits = result.logits[masked].float()
            if sampled is None and self.sampling == "gumbel":
                noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1.0 - 1e-7)))
                sampled = (logits + noise).argmax(-1)
            elif sampled is None:
                sampled = torch.multinomial(logits.softmax(-1), 1)[:, 0]
            corrupted = input_ids.clone()
            corrupted[masked] = sampled
            replaced = torch.zeros_like(labels)
            replaced[masked] = (sampled != labels[masked]).long()
        found = self.discriminator(input_ids=corrupted, attention_mask=present, labels=replaced)
        return result.loss, found.loss


def plain(raw: Mapping[str, Any], vocabulary: Vocabulary, sampling: str) -> Plain:
    """The peer, with the very weights that our run starts from."""
    module: Any = build_module(Parameters.from_dict(raw, source="electra.py"), vocabulary)
    models = []
    for kind, model in ((ElectraForMaskedLM, module.generator), (ElectraForPreTraining, module.discriminator)):
        mine = kind(model.config)
        mine.load_state_dict(model.state_dict())
        models.append(mine)
    return Plain(*models, sampling).train()


def train_plain(
    seed: int,
    raw: Mapping[str, Any],
    vocabulary: Vocabulary,
    sequences: Sequence[Sequence[int]],
    *,
    sampling: str,
    steps: int,
    warm_up: int = 1,
) -> turns.Turn:
    """Trains the peer for `warm_up` + `steps` steps, 15 % masked: 85 % of those [MASK], 15 % as they are."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    module = plain(raw, vocabulary, sampling)
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    special = torch.from_numpy(vocabulary.is_special)
    rows = raw["batch_size"]["-1"]
    order = torch.randperm(len(sequences)).tolist()
    assert vocabulary.pad is not None and vocabulary.mask is not None
    clock, tokens = Clock(warm_up=warm_up, steps=steps), []
    for step in range(warm_up + steps):
        chosen = [torch.tensor(sequences[order[(step * rows + row) % len(order)]]) for row in range(rows)]
        ids = pad_sequence(chosen, batch_first=True, padding_value=vocabulary.pad)
        lengths = torch.tensor([len(sequence) for sequence in chosen])
        present = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        masked = (torch.rand(ids.shape) < 0.15) & ~special[ids]
        labels = ids.masked_fill(~masked, -100)
        shown = ids.masked_fill(masked & (torch.rand(ids.shape) < 0.85), vocabulary.mask)
        generator_loss, discriminator_loss = module(shown, present, labels)
        (GENERATOR_WEIGHT * generator_loss + DISCRIMINATOR_WEIGHT * discriminator_loss).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended()
        tokens.append(int(lengths.sum()))
    timed = zip(tokens[warm_up:], clock.differences(), strict=True)
    return turns.Turn([turns.Step(count, *seconds) for count, seconds in timed], {})


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
        differences = same_losses(raw, store)
        theirs = partial(
            train_plain, raw=raw, vocabulary=data.vocabulary, sampling=arguments.sampling, steps=arguments.peer_steps
        )
        contestants: dict[str, turns.Contestant] = {
            "plain, padded lines": partial(theirs, sequences=framed),
            "plain, joined blocks": partial(theirs, sequences=peer.blocks(framed, arguments.sequence_length)),
            OURS: partial(ours.train, raw=raw, steps=arguments.steps),
        }
        results = turns.race(contestants, arguments.rounds)
    return verdict(results, max(differences), GOALS)


def parameters(store: TokenStore, arguments: argparse.Namespace) -> dict[str, Any]:
    """Our run: the peer's models, batch size and optimizer settings."""
    return {
        "data": {"train": [{"store": str(store.folder)}], "sequence_length": arguments.sequence_length},
        "architecture": {
            "type": "electra", "num_hidden_layers": arguments.layers,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        "objective": {
            "type": "replaced_token", "generator_size": arguments.generator_size,
            "generator_weight": GENERATOR_WEIGHT, "discriminator_weight": DISCRIMINATOR_WEIGHT,
        },
        "optimizer": {"type": "adamw", "learning_rate": 5e-5, "weight_decay": 0.0},
        "schedule": {"type": "constant"},
        "precision": "fp32",
        "batch_size": {"-1": arguments.batch_size},
        "max_steps": arguments.steps,
        "checkpoint": {"model": "never"},
    }  # fmt: skip


def same_losses(raw: Mapping[str, Any], store: TokenStore) -> tuple[float, float]:
    """How far both losses are apart: packed through ours, padded through the peer. Same weights, sequences, masks and
    samples. Prints them, and how far the gradients are apart."""
    settings = Parameters.from_dict(raw, source="electra.py")
    vocabulary: Vocabulary = store.facts.vocabulary
    objective: Any = settings.objective
    source = RowSource(store, objective.row_layout(), sequence_length=settings.data.sequence_length, seed=settings.seed)
    batch = objective.collate(source.load(0, np.arange(settings.batch_size["-1"])), vocabulary)
    theirs = plain(raw, vocabulary, "gumbel")
    module: Any = build_module(settings, vocabulary)
    attention.use(module, "sdpa")
    drawn: list[Tensor] = []
    sample = module.sample
    module.sample = lambda odds, inner: drawn.append(sample(odds, inner)) or drawn[-1]
    sums = module({name: torch.from_numpy(array) for name, array in batch.arrays.items()})
    mine = (sums["generator_loss"] / batch.counts["masked"], sums["discriminator_loss"] / batch.counts["tokens"])
    (GENERATOR_WEIGHT * mine[0] + DISCRIMINATOR_WEIGHT * mine[1]).backward()
    ids, present, labels = unpacked(batch, vocabulary)
    used = torch.from_numpy(batch.arrays["masked_labels"] != -100)
    other = theirs(ids, present, labels, drawn[0][used])  # masked places come in the same order on both sides
    (GENERATOR_WEIGHT * other[0] + DISCRIMINATOR_WEIGHT * other[1]).backward()
    gradients = dict(theirs.named_parameters())
    apart = max(
        float((value.grad - gradients[name].grad).norm() / gradients[name].grad.norm())  # type: ignore[operator, union-attr]
        for name, value in module.named_parameters()
        if gradients[name].grad.norm() > 1e-5  # type: ignore[union-attr] # a key's bias: zero but for rounding
    )
    differences = [abs(float(one.detach() - two.detach())) for one, two in zip(mine, other, strict=True)]
    print(
        f"{len(ids)} sequences, {batch.counts['masked']} masked: generator ours {float(mine[0].detach()):.7f}, plain "
        f"{float(other[0].detach()):.7f}; discriminator ours {float(mine[1].detach()):.7f}, plain "
        f"{float(other[1].detach()):.7f}; gradients apart by at most {apart:.1e} of their norm"
    )
    return differences[0], differences[1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl[.gz] with a field text, or lines of text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer's folder")
    parser.add_argument("--lines", type=int, default=6000, help="how many lines are drawn")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--generator-size", default="1/4")
    parser.add_argument("--sampling", choices=["gumbel", "multinomial"], default="gumbel", help="the peer's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of ours in a round")
    parser.add_argument("--peer-steps", type=int, default=3, help="timed steps of each peer in a round")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
