"""The peer: Transformers' own `Trainer`, with its defaults, timed step by step."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from step_clock import Clock
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from turns import Step, Turn

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.training.model.build import build_module


class Sequences(torch.utils.data.Dataset):
    """Tokenised sequences in memory."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": list(self.sequences[index])}


def blocks(sequences: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """What `group_texts` of Transformers' examples makes: everything joined, cut every `length`, the rest dropped."""
    joined = [number for sequence in sequences for number in sequence]
    return [joined[start : start + length] for start in range(0, len(joined) - length + 1, length)]


class ClockCallback(TrainerCallback):
    """Tells a clock that a step ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.step_ended()


def model_of(raw: Mapping[str, Any], vocabulary: Vocabulary) -> PreTrainedModel:
    """The model that our run with the parameters `raw` starts from: its very weights."""
    model: PreTrainedModel = build_module(Parameters.from_dict(raw, source="bench"), vocabulary).model
    return copy.deepcopy(model)


def train(
    seed: int,
    raw: Mapping[str, Any],
    vocabulary: Vocabulary,
    tokenizer_folder: Path,
    sequences: Sequence[Sequence[int]],
    *,
    steps: int,
    warm_up: int = 1,
    **arguments: Any,
) -> Turn:
    """Trains the model of `raw` on `sequences` for `warm_up` + `steps` steps: 15 % masked, padded to the longest.

    `arguments` are `TrainingArguments` beside the batch size; with use_cpu and all else left alone, its defaults.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True, trust_remote_code=False)
    masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    tokens: list[int] = []

    def collate(examples: list[dict[str, Any]]) -> Mapping[str, torch.Tensor]:
        batch = masking(examples)
        tokens.append(int(batch["attention_mask"].sum()))
        return batch

    clock = Clock(warm_up=warm_up, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=raw["batch_size"]["-1"],
            max_steps=warm_up + steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            **arguments,
        )
        trainer = Trainer(
            model_of(raw, vocabulary), settings, collate, Sequences(sequences), callbacks=[ClockCallback(clock)]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    timed = zip(tokens[warm_up : warm_up + steps], clock.differences(), strict=True)
    return Turn([Step(count, *seconds) for count, seconds in timed], {})
