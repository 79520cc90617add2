"""The two sides of a rate: terakoya's run, and Transformers' `Trainer` on the very rows of that run.

Letters in shapes: B rows, T positions, S documents.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from turns_at_device import Clock

from terakoya.components import Batch
from terakoya.components.rows import Rows
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.rows.loader import Loader
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.training.model.build import build_module

Form = Literal["rows", "documents"]
"""What the peer is given of a micro-step: our rows, each as one sequence, or their documents, padded to the longest."""
IGNORED = -100
FEWEST_LOGGED = 7
"""Steps of a record: of fewer a run does not say how often its GPU waited (`training/step_clock.py`)."""


@dataclass(frozen=True)
class Ours:
    """A run as `terakoya train` makes it, in a folder below `work`."""

    raw: Mapping[str, Any]
    work: Path
    window: int

    def train(self, clock: Clock) -> None:
        """Trains until the clock has enough. A record of a part of its steps says how often the GPU waited."""
        import ours

        raw = {**self.raw, "logging_steps": max(FEWEST_LOGGED, clock.warm_up + clock.window)}
        try:
            ours.run(raw, clock.steps + 1, clock, self._folder)  # not its last step, after which a run is saved
        except UserError:
            if not clock.done:  # its `Enough`, as the error of a plugin
                raise

    def facts(self, clock: Clock) -> dict[str, Any]:
        """Returns the real tokens of each window, the operations of a token as the run counts them, `gpu_waits`, the
        share of steps in which the GPU waited for the host (None where it is not known), and what "auto" became."""
        import ours

        said: dict[str, Any] = {"gpu_waits": None}
        for line in (self._folder / "metrics.jsonl").read_text().splitlines():
            said |= json.loads(line)  # the last of each name
        return {
            "tokens": clock.of_windows(ours.clock_plugin().tokens),
            **{name: said[name] for name in ("flops_per_token", "gpu_waits")},
            **{name: said["world"][name] for name in ("compile", "cuda_graphs", "deterministic")},
            **clock.facts(),
        }

    @property
    def _folder(self) -> Path:
        return self.work / "run"


@dataclass(frozen=True)
class Peer:
    """`Trainer` with the model, batch size and learning rate of our run `raw`, on the rows of that run's steps.

    Its batches are made before the clock starts, so that loading them costs it nothing. Weights are random, made on the
    device.
    """

    raw: Mapping[str, Any]
    window: int
    form: Form = "rows"
    on_cpu: bool = False

    def train(self, clock: Clock) -> None:
        """Trains for the clock's steps."""
        import peer

        assert "activation_checkpointing" not in self.raw
        transformers.logging.set_verbosity_error()
        micro_steps = self.raw["batch_size"]["-1"] // self.raw["micro_batch_size"]
        batches = [inputs for inputs, _ in micro_batches(self.raw, clock.steps * micro_steps, self.form)]
        backend = "eager" if self.on_cpu else None  # a toy is traced only, and waits for no compiler
        with tempfile.TemporaryDirectory() as folder:
            settings = transformers.TrainingArguments(
                folder, per_device_train_batch_size=1, gradient_accumulation_steps=micro_steps, max_steps=clock.steps,
                learning_rate=self.raw["optimizer"].get("learning_rate", 1e-4), lr_scheduler_type="constant",
                bf16=True, use_cpu=self.on_cpu, save_strategy="no", report_to="none", disable_tqdm=True,
                remove_unused_columns=False, train_sampling_strategy="sequential", torch_compile=True,
                torch_compile_backend=backend,
            )  # fmt: skip
            trainer = transformers.Trainer(
                model(self.raw, torch.device("cpu" if self.on_cpu else "cuda")), settings, itemgetter(0), batches,
                callbacks=[peer.ClockCallback(clock)],  # type: ignore[arg-type]
            )  # fmt: skip
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()

    def facts(self, clock: Clock) -> dict[str, Any]:
        """Returns the real tokens of each window, which are those of ours."""
        micro_steps = self.raw["batch_size"]["-1"] // self.raw["micro_batch_size"]
        counts = [count for _, count in micro_batches(self.raw, clock.steps * micro_steps, "rows")]
        of_steps = [sum(counts[start : start + micro_steps]) for start in range(0, len(counts), micro_steps)]
        return {"tokens": clock.of_windows(of_steps), **clock.facts()}


def micro_batches(raw: Mapping[str, Any], count: int, form: Form) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yields the arguments of Transformers' models for each of the first `count` micro-steps of our run `raw`, with our
    masks, and the number of real tokens."""
    parameters = Parameters.from_dict(raw, source="peer")
    vocabulary = TokenStore.open(Path(raw["data"]["train"][0])).facts.vocabulary
    for loaded in loaded_rows(raw, count):
        batch = parameters.objective.collate(loaded, vocabulary)
        real = int((loaded.document_ids >= 0).sum())
        yield _inputs(batch, torch.from_numpy(loaded.document_ids), vocabulary.pad or 0, form), real


def loaded_rows(raw: Mapping[str, Any], count: int) -> Iterator[Rows]:
    """Yields the rows of each of the first `count` micro-steps of our run `raw`."""
    parameters = Parameters.from_dict(raw, source="peer")
    opened, layout = TokenStore.open(Path(raw["data"]["train"][0])), parameters.objective.row_layout()
    source = RowSource(opened, layout, sequence_length=parameters.data.sequence_length, seed=parameters.seed)
    loader, rows = Loader([source], [1.0]), raw["micro_batch_size"]
    for number in range(count):
        yield loader.load(number * rows, (number + 1) * rows)


def _inputs(batch: Batch, document_ids: Tensor, pad: int, form: Form) -> dict[str, Tensor]:
    """Returns `input_ids`, `labels`, and for causal models `shift_labels` (B, T), or (S, T) with an `attention_mask`.

    Rows are given without a mask: the peer attends to whole rows, padding included, by the fastest kernel that it has.
    """
    ids = torch.from_numpy(batch.arrays["input_ids"]).long()
    is_causal = "labels" in batch.arrays
    if is_causal:
        labels = torch.from_numpy(batch.arrays["labels"]).long()
    else:
        places, masked = (torch.from_numpy(batch.arrays[f"masked_{name}"]).long() for name in ("positions", "labels"))
        labels = torch.full((ids.numel(),), IGNORED)
        labels[places[masked != IGNORED]] = masked[masked != IGNORED]
        labels = labels.view_as(ids)
    arrays = {"input_ids": ids, "labels": labels}
    if form == "documents":
        arrays = {name: _unpacked(each, document_ids, pad if name == "input_ids" else IGNORED)
                  for name, each in arrays.items()}  # fmt: skip
        arrays["attention_mask"] = (_unpacked(torch.ones_like(ids), document_ids, 0) > 0).long()
    return {**arrays, "shift_labels": arrays["labels"]} if is_causal else arrays


def _unpacked(values: Tensor, document_ids: Tensor, padding: int) -> Tensor:
    """Returns the `values` (B, T) of each document as a row (S, T), `padding` behind them."""
    pieces = [
        row[ids == number]
        for row, ids in zip(values, document_ids, strict=True)
        for number in range(int(ids.max()) + 1)
    ]
    return pad_sequence(pieces, batch_first=True, padding_value=padding)


class _Loss(nn.Module):
    """ELECTRA as most repositories write it, with the sum of its losses as the first result, which `Trainer` takes."""

    def __init__(self, plain: nn.Module, generator_weight: float, discriminator_weight: float) -> None:
        super().__init__()
        self.plain = plain
        self.weights = generator_weight, discriminator_weight

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the `loss` of `input_ids` and `labels` (B, T)."""
        losses = self.plain(input_ids, attention_mask, labels)
        return {"loss": sum(weight * loss for weight, loss in zip(self.weights, losses, strict=True))}


def model(raw: Mapping[str, Any], device: torch.device) -> nn.Module:
    """Returns Transformers' own model of our run `raw`, on `device`, with weights of its own."""
    import electra

    vocabulary = TokenStore.open(Path(raw["data"]["train"][0])).facts.vocabulary
    with torch.device("meta"):
        module: Any = build_module(Parameters.from_dict(raw, source="peer"), vocabulary)
    with torch.device(device):
        if raw["objective"]["type"] == "replaced_token":
            of = transformers.ElectraForMaskedLM, transformers.ElectraForPreTraining
            pair = (kind(each.config) for kind, each in zip(of, (module.generator, module.discriminator), strict=True))
            plain = electra.Plain(*pair, "gumbel")
            return _Loss(plain, electra.GENERATOR_WEIGHT, electra.DISCRIMINATOR_WEIGHT)
        theirs: nn.Module = type(module.model)(module.model.config)
        return theirs
