"""The peer of causal models: Transformers' own `Trainer`, timed step by step, its losses kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import peer
import torch
import transformers
from step_clock import Clock
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from turns import Step, Turn

from terakoya.config.parameters import Parameters
from terakoya.rows.loader import Loader
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.training.model.build import build_module

Collate = Callable[[list[Any]], Mapping[str, Tensor]]


class Items(torch.utils.data.Dataset):
    """What a collator is handed, in memory."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.items[index])


class LossKeeper(Trainer):
    """`Trainer`, which also keeps each micro-batch's share of its step's loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shares: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.shares.append(loss)
        return loss


def model_of(parameters: Parameters, store: TokenStore) -> PreTrainedModel:
    """Transformers' own model with the very weights that our run with `parameters` starts from."""
    model: Any = build_module(parameters, store.facts.vocabulary).model
    theirs: PreTrainedModel = type(model)(model.config)
    theirs.load_state_dict(model.state_dict())
    return theirs


def rows(raw: Mapping[str, Any], count: int) -> Items:
    """The first `count` rows of our order as blocks (T,), each token's label the one that follows in the stream."""
    parameters = Parameters.from_dict(raw, source="bench")
    store = TokenStore.open(parameters.data.train[0].store)
    source = RowSource(
        store, parameters.objective.row_layout(), sequence_length=parameters.data.sequence_length, seed=parameters.seed
    )
    loaded = Loader([source], [1.0]).load(0, count)
    assert loaded.labels is not None
    labels = loaded.labels.astype(np.int64)
    present = (loaded.document_ids >= 0).astype(np.int64)
    arrays = {
        "input_ids": loaded.tokens.astype(np.int64), "attention_mask": present, "labels": labels, "shift_labels": labels
    }  # fmt: skip
    return Items([{name: array[row] for name, array in arrays.items()} for row in range(count)])


def documents(store: TokenStore, *, longest: int) -> list[list[int]]:
    """Each document's ids and the end of sequence, cut to `longest`."""
    offsets = store.offsets[store.documents]
    end = store.facts.vocabulary.end
    assert end is not None and store.facts.eos is None
    return [[*store.tokens[start:stop].tolist(), end][:longest] for start, stop in pairwise(offsets.tolist())]


def train_rows(number: int, raw: Mapping[str, Any], *, steps: int, warm_up: int = 1) -> Turn:
    """Trains on our rows in our order."""
    items = rows(raw, (warm_up + steps) * raw["batch_size"]["-1"])
    return train(
        number, raw, items, default_data_collator, micro_batch_size=raw["micro_batch_size"], steps=steps,
        warm_up=warm_up, train_sampling_strategy="sequential",
    )  # fmt: skip


def train_padded(
    number: int, raw: Mapping[str, Any], *, documents_at_once: int, steps: int, warm_up: int = 1, **arguments: Any
) -> Turn:
    """Trains on documents in a random order, `documents_at_once` of them padded to the longest."""
    store = TokenStore.open(raw["data"]["train"][0]["store"])
    tokenizer = AutoTokenizer.from_pretrained(store.tokenizer_folder, local_files_only=True, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.bos_token  # which no document holds: an end must stay a label
    items = Items([{"input_ids": each} for each in documents(store, longest=raw["data"]["sequence_length"])])
    return train(
        number, raw, items, DataCollatorForLanguageModeling(tokenizer, mlm=False),
        micro_batch_size=documents_at_once, steps=steps, warm_up=warm_up, **arguments,
    )  # fmt: skip


def train(
    number: int,
    raw: Mapping[str, Any],
    items: Items,
    collate: Collate,
    *,
    micro_batch_size: int,
    steps: int,
    warm_up: int,
    **arguments: Any,
) -> Turn:
    """Trains the model of `raw` for `warm_up` + `steps` steps with its optimizer settings and accumulation.

    `arguments` are further `TrainingArguments`. Tokens are those that are predicted; the facts hold each step's loss.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    parameters = Parameters.from_dict(raw, source="bench")
    store = TokenStore.open(parameters.data.train[0].store)
    accumulation = raw["batch_size"]["-1"] // raw["micro_batch_size"]
    targets: list[int] = []

    def counted(examples: list[Any]) -> Mapping[str, Tensor]:
        batch = collate(examples)
        targets.append(int((batch.get("shift_labels", batch["labels"][:, 1:]) != -100).sum()))
        return batch

    optimizer = raw["optimizer"]
    clock = Clock(warm_up=warm_up, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, per_device_train_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation,
            max_steps=warm_up + steps, learning_rate=optimizer["learning_rate"],
            weight_decay=optimizer["weight_decay"], adam_beta1=optimizer["betas"][0], adam_beta2=optimizer["betas"][1],
            lr_scheduler_type="constant", max_grad_norm=1.0, seed=number, use_cpu=True, save_strategy="no",
            report_to="none", disable_tqdm=True, remove_unused_columns=False, **arguments,
        )  # fmt: skip
        trainer = LossKeeper(
            model_of(parameters, store), settings, counted, items, callbacks=[peer.ClockCallback(clock)]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    of_steps = range(warm_up + steps)
    tokens = [sum(targets[step * accumulation : (step + 1) * accumulation]) for step in of_steps]
    losses = [float(sum(trainer.shares[step * accumulation : (step + 1) * accumulation])) for step in of_steps]
    timed = zip(tokens[warm_up:], clock.differences(), strict=True)
    return Turn(
        [Step(count, *seconds) for count, seconds in timed], {f"loss {step}": losses[step] for step in of_steps}
    )
