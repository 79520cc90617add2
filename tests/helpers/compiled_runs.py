"""Toy runs of every bundled family on a CPU, as a GPU runs them by default: compiled blocks, hidden states and copies
of weights in bf16, attention by flash or with masks. The compiler traces graphs and writes no kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import toy
from flash_on_a_cpu import flash_on_a_cpu
from torch import Tensor
from torch._dynamo.utils import counters

from terakoya.config.parameters import Parameters
from terakoya.plugins import registry
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.model import compilation
from terakoya.training.setup import train_in_this_process
from terakoya.training.trainer import Trainer
from terakoya_contract import toy as toy_model

MODERNBERT = {
    "type": "modernbert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 48, "attention_dropout": 0.0,
}  # fmt: skip
"""A generator, since ModernBERT's has to be given."""
CASES = {
    "bert": ("bert", "masked_lm", {}),
    "bert, stream": ("bert", "masked_lm", {"layout": "stream"}),
    "bert, lines": ("bert", "masked_lm", {"layout": "lines"}),
    "bert, pairs": ("bert", "masked_lm", {"layout": "pairs", "next_sentence": True}),
    "roberta": ("roberta", "masked_lm", {}),
    "deberta": ("deberta", "masked_lm", {}),
    "deberta_v2": ("deberta_v2", "masked_lm", {}),
    "modernbert": ("modernbert", "masked_lm", {}),
    "eurobert": ("eurobert", "masked_lm", {}),
    "electra": ("electra", "replaced_token", {}),
    "deberta_v2, replaced": ("deberta_v2", "replaced_token", {"sharing": "none"}),
    "modernbert, replaced": ("modernbert", "replaced_token", {"generator": MODERNBERT, "generator_size": None}),
    "modernbert, retromae": ("modernbert", "retromae", {}),
    "bert, contrastive": ("bert", "contrastive", {}),
    "gpt2": ("gpt2", "causal_lm", {}),
    "gpt2, stream": ("gpt2", "causal_lm", {"layout": "stream"}),
    "gptj": ("gptj", "causal_lm", {}),
    "llama": ("llama", "causal_lm", {}),
    "qwen3": ("qwen3", "causal_lm", {}),
    "qwen3, conversations": ("qwen3", "instruction", {"layout": "padded"}),
    "mistral": ("mistral", "causal_lm", {}),
    "olmo2": ("olmo2", "causal_lm", {}),
    "gemma3_text": ("gemma3_text", "causal_lm", {}),
    "modernbert_decoder": ("modernbert_decoder", "causal_lm", {}),
    "t5": ("t5", "span_corruption", {"noise_density": 0.25, "mean_noise_span_length": 1.0}),
}  # fmt: skip
"""Architecture, objective, and settings of the objective by name."""
ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
"""Flash has none of these."""
OTHER_DROPOUTS = ("hidden_dropout_prob", "resid_pdrop", "embd_pdrop", "dropout_rate")


def backends(name: str) -> tuple[str, ...]:
    """The kinds of attention that a GPU can take for the case `name`."""
    masking = registry().component("architectures", CASES[name][0]).document_masking
    return ("flash", "sdpa") if masking == "attention_interface" else ("sdpa",)


def parameters(
    name: str, folder: Path, *, sizes: Mapping[str, Any] | None = None, without_dropout: bool = False, **changes: Any
) -> Parameters:
    """A run of six steps of micro-batches of 3, 3 and 2 rows, of which the last has 3, 1 and none. `folder` gets the
    store, unless it has one. `sizes` are other fields of the architecture."""
    architecture, objective, settings = CASES[name]
    kind = registry().component("architectures", architecture)
    dropouts = (*ATTENTION_DROPOUTS, *OTHER_DROPOUTS) if without_dropout else ATTENTION_DROPOUTS
    no_dropout = {key: 0.0 for key in dropouts if key in kind.model_fields}
    further = {**toy_model.values(registry().component("objectives", objective)), **settings}
    given = toy.parameters(
        folder / "store" / "store", folder / "store" / "store",
        architecture={"type": architecture, **toy_model.values(kind), **no_dropout, **(sizes or {})},
        objective={"type": objective, **further},
        optimizer={"type": "adamw", "learning_rate": 1e-3}, schedule={"type": "constant"},
        batch_size={"-1": 8}, micro_batch_size=3, max_steps=None, epochs=1.0,
        evaluation={"steps": 3, "batches": 2}, checkpoint={"save_steps": 100, "model": "never"},
    )  # fmt: skip
    given |= {"precision": "bf16", "compile": "blocks", **changes}
    layout = Parameters.from_dict(given, source=name).objective.row_layout()
    place = folder / "store" / "store"
    store = TokenStore.open(place) if place.exists() else toy_model.make_store_for(layout, folder / "store")
    rows = len(RowSource(store, layout, sequence_length=32, seed=1))
    return Parameters.from_dict({**given, "epochs": (5 * 8 + 4) / rows}, source=name)


def saved(run: Parameters, out: Path, *, backend: str, compiler: str | None) -> dict[str, Tensor]:
    """What the last checkpoint of `run` holds: weights and the optimizer's means of gradients. Without a `compiler` the
    same blocks run uncompiled."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compilation, "BACKEND", compiler))
        stack.enter_context(mock.patch.object(attention, "choose", lambda *_, **__: backend))
        # as many documents as a batch has, rounded up: their number differs from batch to batch
        stack.enter_context(mock.patch.object(attention, "FEWEST_DOCUMENTS", 1))
        stack.enter_context(flash_on_a_cpu())
        if compiler is None:
            stack.enter_context(compilation.run_uncompiled(run.compile != "off"))
        train_in_this_process(run, out)
    (checkpoint,) = (out / "checkpoints").iterdir()
    kinds = {kind: toy.saved(checkpoint, kind) for kind in ("model", "optimizer")}
    return {f"{kind}/{name}": value for kind, values in kinds.items() for name, value in values.items()}


@contextlib.contextmanager
def graphs_by_step() -> Iterator[list[int]]:
    """While open, the list gets the number of graphs after each step, and after the last validation."""
    seen: list[int] = []
    take_step, train = Trainer._step, Trainer.train

    def count() -> None:
        seen.append(counters["stats"].get("unique_graphs", 0))

    def step(trainer: Trainer, *arguments: Any) -> Any:
        report = take_step(trainer, *arguments)
        count()
        return report

    def train_and_count(trainer: Trainer, *arguments: Any) -> Any:
        result = train(trainer, *arguments)
        count()
        return result

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(Trainer, "_step", step), mock.patch.object(Trainer, "train", train_and_count):
        yield seen
    torch._dynamo.reset()
