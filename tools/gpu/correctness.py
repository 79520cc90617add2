"""Does this GPU compute what float32 on the CPU computes, in every precision, and does a step ever wait?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from settings import Case, Measurement, Settings
from torch import Tensor
from turns_at_device import describe

from terakoya.components import Batch
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import to_device
from terakoya.training.engines.engine import autocast_forward
from terakoya.training.loss import weighted_loss
from terakoya.training.model import compilation, determinism
from terakoya.training.model.build import build_module
from terakoya_precision.bf16_stream import WeightCopies

PRESETS = ("bert_base", "electra_small", "modernbert_base", "t5_base", "gpt2_125m", "llama_1b")
"""One of each architecture that differs in its attention, its positions or its losses."""
TWO_LAYERS = {"num_hidden_layers": 2}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"type": "adamw", "learning_rate": 1e-4},
    "adamw, uncorrected": {"type": "adamw", "learning_rate": 1e-4, "bias_correction": False},
    "stable_adamw": {"type": "stable_adamw", "learning_rate": 1e-4},
    "lion": {"type": "lion", "learning_rate": 1e-5},
    "muon": {"type": "muon", "learning_rate": 1e-3},
    "adafactor": {"type": "adafactor"},
}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "fp32", "tf32": True},
    "bf16": {"precision": "bf16"},
    "bf16, not compiled": {"precision": "bf16", "compile": "off"},
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
}


@dataclass(frozen=True)
class Way:
    """A way to compute a loss and its gradient."""

    precision: str
    attention: str
    is_compiled: bool = False


EXACT = Way("fp32", "sdpa")
GOALS = {"fp32": 1e-4, "bf16": 1e-2}
"""How far a loss may be from that of float32 on the CPU, as a share of it."""


def parity(settings: Settings) -> Iterator[Measurement]:
    """Yields losses and gradients of two layers of each architecture, beside float32 on the CPU."""
    determinism.choose(deterministic=True)
    problems = {name: Problem.of(name, settings) for name in PRESETS}
    pairs = [(name, way) for name in PRESETS for way in ways(name, settings)]
    for name, way in sorted(pairs, key=lambda pair: pair[1].is_compiled):  # those last, as they take longest
        problem = problems[name]
        case = {
            "preset": name, "precision": way.precision, "attention": way.attention, "compiled": way.is_compiled,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }  # fmt: skip
        try:
            loss, (gradient, again) = problem.solve(settings, way)
        except Exception as raised:  # noqa: BLE001 - what fails is a measurement, too, and others follow
            yield {**case, "error": describe(raised)}
            continue
        loss_error = abs(loss / problem.loss - 1)
        yield {
            **case, "loss_error": loss_error, "close": loss_error <= GOALS[way.precision],
            "gradient_error": float((gradient - problem.gradient).norm() / problem.gradient.norm()),
            "same_bits_twice": torch.equal(gradient, again),
        }  # fmt: skip


def ways(name: str, settings: Settings) -> Iterator[Way]:
    """Yields the ways to compute a step of the preset `name`: neither T5 nor a CPU has flash attention."""
    has_flash = not settings.tiny and not name.startswith("t5")
    yield EXACT
    yield Way("bf16", "sdpa")
    if has_flash:
        yield Way("bf16", "flash")
    yield Way("bf16", "flash" if has_flash else "sdpa", is_compiled=True)


@dataclass(frozen=True)
class Problem:
    """A model and a batch, with its loss and its gradient by float32 on the CPU."""

    parameters: Parameters
    opened: TokenStore
    batch: Batch
    loss: float
    gradient: Tensor

    @classmethod
    def of(cls, name: str, settings: Settings) -> Problem:
        """Returns that of two layers of the preset `name`."""
        if name.startswith("t5"):  # a store of text may have too few sentinel tokens
            layers, settings = {"num_layers": 2}, replace(settings, store=None)
        else:
            layers = TWO_LAYERS
        raw = Case(name, 4, 1, architecture=layers).parameters(settings)
        parameters = Parameters.from_dict({**raw, "precision": "fp32"}, source=name)
        opened = TokenStore.open(Path(raw["data"]["train"][0]))
        layout, length = parameters.objective.row_layout(), parameters.data.sequence_length
        rows = RowSource(opened, layout, sequence_length=length, seed=1, store_id=0).load(0, range(4))  # type: ignore[arg-type]
        batch = parameters.objective.collate(rows, opened.facts.vocabulary)
        loss, gradients = loss_and_gradients(parameters, batch, opened, torch.device("cpu"), EXACT, times=1)
        return cls(parameters, opened, batch, loss, gradients[0])

    def solve(self, settings: Settings, way: Way) -> tuple[float, list[Tensor]]:
        """Returns the loss and the gradient on the settings' device, the gradient twice."""
        backend = compilation.TRACE_ONLY if settings.tiny else None  # a toy waits for no compiler
        return loss_and_gradients(self.parameters, self.batch, self.opened, settings.device, way, backend=backend)


def loss_and_gradients(
    parameters: Parameters,
    batch: Batch,
    opened: TokenStore,
    device: torch.device,
    way: Way,
    *,
    times: int = 2,
    backend: str | None = None,
) -> tuple[float, list[Tensor]]:
    """Returns the loss of `batch` without dropout, and the gradient of all weights, float64 on the CPU, as often as
    `times` says; `backend` is torch's name of the compiler, None for its usual one."""
    vocabulary = opened.facts.vocabulary
    module = build_module(parameters, vocabulary)
    attention.use(module, attention.MASKED if way.is_compiled and way.attention == "sdpa" else way.attention)
    module.to(device).eval()
    module.training = True  # the root computes the terms of training, its parts have no dropout
    if way.precision == "bf16":
        WeightCopies(module)
    autocast_forward(module, device, way.precision)
    if way.is_compiled:
        torch._dynamo.reset()
        architectures = parameters.objective.architectures(parameters.architecture)
        layout = parameters.objective.row_layout()
        compilation.compile_parts(compilation.blocks(module, architectures, vocabulary), layout, backend=backend)
    arrays, gradients = to_device(batch, device, flash=way.attention == "flash", compiled=way.is_compiled), []
    for _ in range(times):
        module.zero_grad()
        loss = weighted_loss(module(arrays), parameters.objective.terms(), batch.counts)
        loss.backward()
        own = [each.grad.flatten().double().cpu() for each in module.parameters() if each.grad is not None]
        gradients.append(torch.cat(own))
    return float(loss.detach()), gradients


class WaitsForbidden:
    """A clock for `ours.run` that makes a step which waits for the device an error, beside the first and the last."""

    def __init__(self, steps: int) -> None:
        self.steps, self.ended = steps, 0

    def step_ended(self) -> None:
        """Switches the error on after the second step, off before the last."""
        self.ended += 1
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error" if 2 <= self.ended < self.steps - 1 else "default")


def waits(settings: Settings) -> Iterator[Measurement]:
    """Yields whether any step waits for the device, for every optimizer."""
    import ours

    steps = 5 if settings.tiny else 8
    for name, optimizer in OPTIMIZERS.items():
        raw = Case("bert_base", 4, 1, architecture=TWO_LAYERS, further={"optimizer": dict(optimizer)})
        try:
            ours.run(raw.parameters(settings), steps, WaitsForbidden(steps))
            error = ""
        except Exception as raised:  # noqa: BLE001 - the measurement is whether it fails
            error = describe(raised)
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        yield {"optimizer": name, "waits": "synchronizing" in error, "error": error}  # else a package may be missing


def precisions(settings: Settings) -> Iterator[Measurement]:
    """Yields losses of 50 steps in each precision beside those of float32 on the same rows, and tokens a second; what
    refuses a precision says why."""
    import ours
    from step_clock import Clock

    half = 2 if settings.tiny else 25
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    reference: list[float] = []
    for name, further in PRECISIONS.items():
        case = Case(
            "bert_base", 32, 1, architecture={**TWO_LAYERS, **no_dropout}, further={**further, "logging_steps": 1}
        )
        clock = Clock(warm_up=half, steps=half)
        try:
            tokens, losses = ours.run(case.parameters(settings), clock.steps, clock)
        except UserError as error:
            yield {"precision": name, "refused": str(error)[:300]}
            continue
        values = list(losses.values())
        reference = reference or values
        yield {
            "precision": name, "first": values[0], "last": values[-1],
            "largest_difference": max(abs(a - b) for a, b in zip(values, reference, strict=True)),
            "tokens_per_second": sum(tokens[half:]) / sum(wall for wall, _ in clock.differences()),
        }  # fmt: skip
