"""What every measurement on a GPU shares: where it runs, on which data, at which size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
        corpus, tokenizer: text to train on, and its tokenizer; None for random ids.
    """

    out: Path
    work: Path
    tiny: bool
    corpus: Path | None = None
    tokenizer: Path | None = None

    @property
    def device(self) -> torch.device:
        """Where it is measured."""
        return torch.device("cpu") if self.tiny else torch.device("cuda", 0)


@dataclass(frozen=True)
class Stage:
    """A measurement in a process of its own.

    Attributes:
        run: yields the measurements one by one; each is kept at once.
        seconds: when the process is ended, if it has not ended before.
    """

    run: Callable[[Settings], Iterator[Measurement]]
    seconds: float


TINY_SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "embedding_size": 16, "num_key_value_heads": 1, "d_model": 32, "d_kv": 16,
    "d_ff": 64, "num_layers": 2, "num_heads": 2,
}  # fmt: skip
"""What replaces a preset's own sizes in a toy."""


def preset(name: str, settings: Settings, *, rows: int, **architecture: Any) -> dict[str, Any]:
    """Returns the run of the preset `name` with `rows` rows in one micro-step and changes of its `architecture`, on the
    settings' data, without validation and checkpoints; as a toy where the settings say so."""
    raw: dict[str, Any] = json.loads((ROOT / "parameters" / f"{name}.json").read_text())
    length = 64 if settings.tiny else raw["data"]["sequence_length"]
    sizes = {key: value for key, value in TINY_SIZES.items() if settings.tiny and key in raw["architecture"]}
    if settings.tiny and "generator_size" in raw["objective"]:
        raw["objective"]["generator_size"] = "1/2"  # a third of the toy's width is no whole number
    return {
        "data": {"train": [str(store(settings, length))], "sequence_length": length},
        "architecture": {**raw["architecture"], **sizes, **architecture},
        "objective": raw["objective"],
        "optimizer": raw["optimizer"],
        "schedule": {"type": "constant"},
        "batch_size": {"-1": 4 if settings.tiny else rows},
        "max_steps": 1,
        "precision": "bf16",
        "checkpoint": {"model": "never", "save_steps": 1_000_000},
        "logging_steps": 1_000_000,
        "trackers": [],
        **({"activation_checkpointing": raw["activation_checkpointing"]} if "activation_checkpointing" in raw else {}),
    }


def store(settings: Settings, length: int) -> Path:
    """Returns a token store whose documents fit rows of `length`; it is made once for each length."""
    import lines

    folder = settings.work / f"store-{length}"
    if folder.exists():
        return folder
    count = 200 if settings.tiny else 20_000
    if settings.corpus is not None and settings.tokenizer is not None:
        data = lines.read(settings.corpus, settings.tokenizer, count=count, sequence_length=length, whole=True)
    else:
        data = lines.drawn(
            settings.work / f"tokenizer-{length}", count=count, mean_length=length // 2, sequence_length=length,
            vocabulary_size=1000 if settings.tiny else VOCABULARY_SIZE,
        )  # fmt: skip
    return data.store(folder).folder
