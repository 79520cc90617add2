"""What every measurement on a GPU shares: where it runs, on which data, at which size, and what it is called."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "bench"))

SHIPPED = "as shipped"
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
        apart: whether contestants train in processes of their own.
    """

    out: Path
    work: Path
    tiny: bool
    store: Path | None = None
    apart: bool = True

    @property
    def device(self) -> torch.device:
        """Where it is measured."""
        return torch.device("cpu") if self.tiny else torch.device("cuda", 0)


@dataclass(frozen=True)
class Stage:
    """A measurement, or several that belong together.

    Attributes:
        seconds: how long it takes, about; it is not begun where fewer are left.
        run: yields the measurements one by one; each is kept at once.
    """

    name: str
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
    """A preset as it is measured: as it is shipped, but without its schedule, validation, checkpoints and trackers.

    Attributes:
        rows: rows of a micro-step; None are the preset's.
        micro_steps: micro-steps of an optimizer step; None are the preset's.
        length: the sequence length; None is the preset's.
        vocabulary: pieces of the vocabulary; ids are random where it is not the usual one.
        architecture, further: what differs from the preset; `further` are keys of the run.
    """

    preset: str
    rows: int | None = None
    micro_steps: int | None = None
    length: int | None = None
    vocabulary: int = VOCABULARY_SIZE
    architecture: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def shipped(self) -> Mapping[str, Any]:
        """The preset, in the precision that it has on a GPU."""
        raw = json.loads((ROOT / "parameters" / f"{self.preset}.json").read_text())
        return {**raw, "precision": "bf16"}

    @property
    def label(self) -> str:
        """How it differs from the preset, such as `rows 64, cuda_graphs false`."""
        shipped = self.shipped
        rows = shipped["micro_batch_size"]
        sizes = {
            "rows": (self.rows, rows), "micro-steps": (self.micro_steps, shipped["batch_size"]["-1"] // rows),
            "length": (self.length, shipped["data"]["sequence_length"]),
            "vocabulary": (self.vocabulary, VOCABULARY_SIZE),
        }  # fmt: skip
        differences = [f"{name} {own:,}" for name, (own, preset) in sizes.items() if own not in (None, preset)]
        differences += [f"{key} {json.dumps(value)}" for key, value in {**self.architecture, **self.further}.items()]
        return ", ".join(differences).replace('"', "") or SHIPPED

    @property
    def window(self) -> int:
        """Optimizer steps between two readings of the clock: of about 20 micro-steps, and 3 at least."""
        micro_steps = self.micro_steps or self.shipped["batch_size"]["-1"] // self.shipped["micro_batch_size"]
        return max(3, 20 // micro_steps)

    def parameters(self, settings: Settings) -> dict[str, Any]:
        """Returns the parameters of the run on the settings' data. Where the settings ask for a toy, those of a toy,
        which is not compiled and has no CUDA graphs."""
        raw = copy.deepcopy(dict(self.shipped))
        length = TINY_LENGTH if settings.tiny else self.length or raw["data"]["sequence_length"]
        sizes = {} if self.length is None else {"max_position_embeddings": length}
        rows = self.rows or raw["micro_batch_size"]
        micro_steps = self.micro_steps or raw["batch_size"]["-1"] // raw["micro_batch_size"]
        further = dict(self.further)
        if settings.tiny:
            sizes = {key: value for key, value in TINY_SIZES.items() if key in raw["architecture"]}
            if "generator_size" in raw["objective"]:
                raw["objective"]["generator_size"] = "1/2"  # a third of the toy's width is no whole number
            rows, micro_steps = TINY_ROWS, min(2, micro_steps)
            further |= {"compile": "off", "cuda_graphs": False}
        kept = ("objective", "optimizer", "activation_checkpointing", "max_grad_norm", "precision", "parallel")
        return {
            **{key: raw[key] for key in kept if key in raw},
            "data": {"train": [str(store(settings, length, self.vocabulary))], "sequence_length": length},
            "architecture": {**raw["architecture"], **sizes, **self.architecture},
            "schedule": {"type": "constant"},
            "batch_size": {"-1": rows * micro_steps},
            "micro_batch_size": rows,
            "max_steps": 1,
            "checkpoint": {"model": "never", "save_steps": 1_000_000},
            "logging_steps": 1_000_000,
            "trackers": [],
            **further,
        }


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
