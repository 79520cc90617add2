"""What every measurement on a GPU shares: where it runs, on which data, at which size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "bench"))

VOCABULARY_SIZE = 32_768
Measurement = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a stage is given.

    Attributes:
        out: the folder for everything that is kept.
        work: a folder for what is not.
        tiny: toy sizes on a CPU, which test the script.
        store: a token store to train on; None for random ids.
        seconds: how long the stage may take.
        apart: whether contestants train in processes of their own.
        warm: whether rates are not measured, but what their runs compile is put into the compiler's cache.
    """

    out: Path
    work: Path
    tiny: bool
    store: Path | None = None
    seconds: float = 600.0
    apart: bool = True
    warm: bool = False

    @property
    def device(self) -> torch.device:
        """Where it is measured."""
        return torch.device("cpu") if self.tiny else torch.device("cuda", 0)


@dataclass(frozen=True)
class Stage:
    """A measurement in a process of its own.

    Attributes:
        part: A, B or C.
        question: what it answers.
        seconds: how long it may take in a part of 8.5 minutes.
        run: yields the measurements one by one; each is kept at once.
    """

    part: str
    name: str
    question: str
    seconds: float
    run: Callable[[Settings], Iterator[Measurement]]


TINY_SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "embedding_size": 16, "num_key_value_heads": 1, "d_model": 32, "d_kv": 16,
    "d_ff": 64, "num_layers": 2, "num_heads": 2,
}  # fmt: skip
"""What replaces a preset's own sizes in a toy."""
TOKENS = 5_000_000
"""Of a store of random ids, about."""
TINY_ROWS, TINY_LENGTH, TINY_VOCABULARY = 4, 64, 1000


@dataclass(frozen=True)
class Case:
    """A preset as it is measured: its architecture, objective and optimizer, without validation and checkpoints.

    Attributes:
        rows: rows of a micro-step.
        micro_steps: micro-steps of an optimizer step.
        length: the sequence length; None is the preset's.
        window: optimizer steps between two readings of the clock.
        vocabulary: pieces of the vocabulary; ids are random where it is not the usual one.
        architecture, objective, further: what differs from the preset; `further` are keys of the run.
    """

    preset: str
    rows: int
    micro_steps: int = 1
    length: int | None = None
    window: int = 20
    vocabulary: int = VOCABULARY_SIZE
    architecture: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self, settings: Settings) -> dict[str, Any]:
        """Returns the parameters of the run on the settings' data; those of a toy where the settings say so."""
        raw: dict[str, Any] = json.loads((ROOT / "parameters" / f"{self.preset}.json").read_text())
        length = TINY_LENGTH if settings.tiny else self.length or raw["data"]["sequence_length"]
        sizes = {} if self.length is None else {"max_position_embeddings": length}
        if settings.tiny:
            sizes = {key: value for key, value in TINY_SIZES.items() if key in raw["architecture"]}
            if "generator_size" in raw["objective"]:
                raw["objective"]["generator_size"] = "1/2"  # a third of the toy's width is no whole number
        rows = TINY_ROWS if settings.tiny else self.rows
        kept = {key: raw[key] for key in ("optimizer", "activation_checkpointing", "max_grad_norm") if key in raw}
        return {
            **kept,
            "data": {"train": [str(store(settings, length, self.vocabulary))], "sequence_length": length},
            "architecture": {**raw["architecture"], **sizes, **self.architecture},
            "objective": {**raw["objective"], **self.objective},
            "schedule": {"type": "constant"},
            "batch_size": {"-1": rows * self.micro_steps},
            "micro_batch_size": rows,
            "max_steps": 1,
            "precision": "bf16",
            "checkpoint": {"model": "never", "save_steps": 1_000_000},
            "logging_steps": 1_000_000,
            "trackers": [],
            **self.further,
        }


def take_deterministic(settings: Settings) -> None:
    """Lets this process take the algorithms that a run takes, which return the same bits each time."""
    from terakoya.training.model import determinism

    if settings.device.type == "cuda":
        determinism.choose(deterministic=True)


def store(settings: Settings, length: int, vocabulary: int = VOCABULARY_SIZE) -> Path:
    """Returns the settings' token store; where there is none, or for another `vocabulary` than the usual one, a store
    of random ids with the lengths of an encyclopaedia's articles, cut to rows of `length`, which is made once."""
    import lines

    if settings.store is not None and vocabulary == VOCABULARY_SIZE:
        return settings.store
    vocabulary = TINY_VOCABULARY if settings.tiny else vocabulary
    folder = settings.work / f"store-{length}-{vocabulary}"
    if not folder.exists():
        data = lines.drawn(
            settings.work / f"tokenizer-{length}-{vocabulary}", mean_length=length // 2,
            count=200 if settings.tiny else 2 * TOKENS // length, sequence_length=length, vocabulary_size=vocabulary,
        )  # fmt: skip
        data.store(folder)
    return folder
