"""Chooses preset, vocabulary, batch and length for a corpus, a machine and a number of hours, with the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from terakoya.config.parameters import Parameters
from terakoya.config.presets import presets_folder, read_preset
from terakoya.errors import UserError, nearest
from terakoya.estimation import devices
from terakoya.estimation.devices import Device
from terakoya.estimation.estimate import Estimate, estimate
from terakoya.estimation.fake_step import model_sizes
from terakoya.estimation.synthetic_rows import row_statistics
from terakoya.json_settings import read_settings

Goal = Literal["try", "model"]
GOALS: Mapping[Goal, str] = {
    "try": "the smallest model, for at most ten minutes: to see that everything works",
    "model": "the best model that corpus and hours allow",
}

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "bert": ("tiny_bert", "bert_small", "bert_base", "bert_large"),
    "electra": ("tiny_electra", "electra_small", "electra_base"),
    "roberta": ("roberta_base",),
    "deberta": ("deberta_base",),
    "modernbert": ("tiny_modernbert", "bert_ja_small", "bert_ja", "modernbert_base"),
    "t5": ("tiny_t5", "t5_base"),
    "gpt2": ("tiny_gpt2", "gpt2_125m", "gpt2_300m"),
    "llama": ("tiny_llama", "gpt_ja", "llama_1b", "llama_8b"),
}
"""Family -> its presets, the smallest first."""
CAUSAL = ("gpt2", "llama")

TOKENS_PER_PARAMETER = 20
"""Training tokens for each parameter outside the embeddings, below which a smaller model is better: Hoffmann et al.
2022 (Chinchilla)."""
PASSES = {"causal": 4, "masked": 40}
"""How often a text may be repeated: up to 4 times is nearly as good as new text (Muennighoff et al. 2023); masks differ
in each pass, and BERT itself passed 40 times over its corpus (Devlin et al. 2018)."""
UNIQUE_TOKENS_PER_PARAMETER = {"causal": 5, "masked": 2}
"""Different tokens for each parameter outside the embeddings, below which a larger model learns the text by heart: for
causal models 20 tokens in 4 passes; for masked ones our own rule."""

CHARACTERS_PER_TOKEN = {"ja": 1.4, "en": 4.2, "other": 3.0}
"""Japanese: bert-base-japanese-v3's tokenizer on Japanese web text. The others are rough."""
VOCABULARIES = ((300_000, 3000), (2_000_000, 4000), (20_000_000, 8000), (300_000_000, 16_000), (math.inf, 32_768))
"""(characters below, pieces): fewer pieces for a small corpus, so that each is seen often enough to be learned."""

NO_STORE = "a store that is not made yet"
TRY_HOURS = 1 / 6
LEAST_STEPS = 5000
"""Below this number of steps a smaller batch is better: each step learns little more from a larger one."""
LEAST_ROWS = 32
CPU_EFFICIENCY = 0.25
"""The share of the speed of a large matrix product that the training of a small model reaches on a CPU, roughly."""
LEAST_STEPS_BETWEEN = 25
"""Steps between two validations or checkpoints, at least: in a run of 60 steps one after every third would take longer
than the training, and show noise."""
LEAST_STEP_SECONDS = 0.01
"""What a micro-step takes on any GPU, about: the host starts hundreds of kernels, each in 5 to 10 microseconds."""


@dataclass(frozen=True)
class Machine:
    """What trains: `count` devices, each at `tflops` in real work, with weights in `precision`."""

    device: Device
    count: int
    tflops: float
    precision: Literal["bf16", "fp32"]

    @property
    def name(self) -> str:
        """Such as `8 x h100`."""
        return f"{self.count} x {self.device.name}" if self.device.gpu else "this machine's CPU"


def find_machine(gpu: str | None, count: int | None) -> Machine:
    """Returns the machine with `count` times the device `gpu`; by default this machine, all its GPUs or its CPU, whose
    speed is measured for a moment.

    Raises:
        UserError: the device is unknown, or this machine has no GPU but several are wanted.
    """
    device = devices.find_device(gpu) if gpu else devices.local_device()
    if device.gpu:
        if gpu is None and count is None:
            import torch

            count = torch.cuda.device_count()
        if device.peak_tflops is None:
            raise UserError(
                f"--gpu: the speed of {device.name} is unknown; name a similar one, such as --gpu a100-80gb"
            )
        return Machine(device, count or 1, devices.USUAL_MFU["bf16"] * device.peak_tflops, "bf16")
    if count and count > 1:
        raise UserError(f"--gpus {count}: this machine has no GPU; name the kind with --gpu, such as --gpu h100")
    return Machine(replace(device, memory=device.memory or _memory()), 1, CPU_EFFICIENCY * _cpu_tflops(), "fp32")


def _memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _cpu_tflops() -> float:
    """Measures float32 matrix products of this machine's CPU for about a quarter of a second; TFLOP/s of the fastest,
    which other programs slow down least."""
    import time

    import torch

    matrix = torch.randn(768, 768)
    torch.mm(matrix, matrix)
    end, fastest = time.perf_counter() + 0.25, math.inf
    while (start := time.perf_counter()) < end:
        torch.mm(matrix, matrix)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * 768**3 / fastest / 1e12


@dataclass(frozen=True)
class Choice:
    """A run for a corpus and a machine.

    Attributes:
        preset: the preset that `parameters`, a parameter file's content, begin from.
        vocabulary: number of pieces.
        tokens: tokens of the corpus; `trained_tokens` those of the run, `passes` their ratio.
        estimated: what `terakoya estimate` says of the run.
        limit: what ended the choice of the model: `corpus`, `hours`, `memory`, `family` (its largest) or `goal`.
    """

    preset: str
    parameters: Mapping[str, Any]
    vocabulary: int
    tokens: int
    trained_tokens: int
    estimated: Estimate
    limit: str

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return int(self.parameters["max_steps"])

    @property
    def hours(self) -> float:
        """How long the run takes, predicted: from its operations, but no step in less than a GPU takes for any."""
        rows = -(-sum(self.parameters["batch_size"].values()) // self.estimated.processes)
        micro_steps = self.steps * -(-rows // self.parameters["micro_batch_size"])
        least = LEAST_STEP_SECONDS * micro_steps / 3600 if self.estimated.device.gpu else 0.0
        return max(least, self.estimated.hours or 0.0)

    @property
    def passes(self) -> float:
        """How often the run passes over the corpus."""
        return self.trained_tokens / self.tokens


def choose_vocabulary(characters: int) -> int:
    """Returns the number of pieces for a corpus of so many characters."""
    return next(pieces for below, pieces in VOCABULARIES if characters < below)


def count_tokens(characters: int, language: str) -> int:
    """Returns roughly how many tokens a text of so many characters has."""
    return max(1, round(characters / CHARACTERS_PER_TOKEN[language]))


def choose(*, tokens: int, vocabulary: int, family: str, goal: Goal, machine: Machine, hours: float) -> Choice:
    """Returns the largest model of `family` for which `tokens` and `hours` suffice, and its run.

    Raises:
        UserError: there is no such family, or not even its smallest model fits into the device's memory.
    """
    if family not in FAMILIES:
        raise UserError(f"--family {family}: there is no such family{nearest(family, FAMILIES)}")
    kind = "causal" if family in CAUSAL else "masked"
    hours = min(hours, TRY_HOURS) if goal == "try" else hours
    budget = hours * 3600 * machine.count * machine.tflops * 1e12
    presets = FAMILIES[family][:1] if goal == "try" else FAMILIES[family]
    limit = "goal" if goal == "try" else "family"
    for preset in reversed(presets):
        raw = read_settings(presets_folder() / f"{preset}.json")
        # not the store at the preset's path: the one that this pipeline makes will have another vocabulary
        raw["data"] = {"train": [NO_STORE], "validation": [NO_STORE], "sequence_length": raw["data"]["sequence_length"]}
        length = raw["data"]["sequence_length"]
        loaded = Parameters.from_dict(raw, source=preset)
        rows = row_statistics(loaded.data, loaded.objective.row_layout(), vocabulary)
        sizes = model_sizes(loaded, rows.vocabulary, context=rows.context)
        body = sizes.parameters - sizes.embeddings
        affordable = budget / sizes.flops_per_token
        if preset != presets[0] and tokens < UNIQUE_TOKENS_PER_PARAMETER[kind] * body:
            limit = "corpus"
            continue
        if preset != presets[0] and affordable < TOKENS_PER_PARAMETER * body:
            limit = "hours"
            continue
        trained = min(affordable, PASSES[kind] * tokens)
        for parameters in _runs(raw, trained=trained, machine=machine):
            estimated = estimate(
                Parameters.from_dict(parameters, source=preset), processes=machine.count, device=machine.device.name,
                vocab_size=vocabulary, tflops=machine.tflops,
            )  # fmt: skip
            estimated = replace(estimated, device=machine.device)
            if estimated.fits is not False:
                done = parameters["max_steps"] * sum(parameters["batch_size"].values()) * length
                return Choice(preset, parameters, vocabulary, tokens, done, estimated, limit)
        limit = "memory"
    raise UserError(f"--family {family}: not even {presets[0]} fits into the memory of {machine.name}")


def _runs(preset: Mapping[str, Any], *, trained: float, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields runs of `preset` over `trained` tokens, each needing less memory than the one before."""
    rows = preset_rows = sum(preset["batch_size"].values())
    length = preset["data"]["sequence_length"]
    while rows > LEAST_ROWS and trained / (rows * length) < LEAST_STEPS:
        rows = max(LEAST_ROWS, rows // 2)
    rows = max(rows, machine.count)
    steps = max(1, round(trained / (rows * length)))
    rate = preset["optimizer"]["learning_rate"]
    scale = math.sqrt(rows / preset_rows)
    schedule = dict(preset["schedule"])
    schedule["warmup_steps"] = min(schedule.get("warmup_steps", steps), steps // 10)
    if "min_lr" in schedule:
        schedule["min_lr"] = _round_to_two_digits(schedule["min_lr"] * scale)
    base = {key: value for key, value in preset.items() if key != "max_tokens"}
    base |= {
        "optimizer": {**preset["optimizer"], "learning_rate": _round_to_two_digits(rate * scale)},
        "schedule": schedule,
        "batch_size": {"-1": rows},
        "max_steps": steps,
        "precision": machine.precision,
        "checkpoint": {**preset["checkpoint"], "save_steps": _interval(steps, 10)},
        "evaluation": {**preset["evaluation"], "steps": _interval(steps, 20)},
        "logging_steps": min(50, max(1, steps // 200)),
    }
    share = -(-rows // machine.count)
    micro = min(share, 64 if machine.device.gpu else 16)
    for engine in ("ddp", "fsdp") if machine.count > 1 else ("ddp",):
        size = micro
        while size >= 1:
            yield {**base, "parallel": {"engine": engine}, "micro_batch_size": size}
            size //= 4 if size > 4 else 2


def _interval(steps: int, parts: int) -> int:
    """Returns the steps between two of `parts` events in a run, at least `LEAST_STEPS_BETWEEN` or the whole run."""
    return max(1, steps // parts, min(steps, LEAST_STEPS_BETWEEN))


def _round_to_two_digits(value: float) -> float:
    """Returns `value` with two digits: 0.00035355 becomes 0.00035."""
    return float(f"{value:.1e}")


def describe_preset(name: str) -> str:
    """Returns the size and the purpose of a preset, such as `18 M parameters, a BERT for small corpora ...`."""
    preset = read_preset(name)
    return f"{preset.size} parameters, {preset.purpose}"
