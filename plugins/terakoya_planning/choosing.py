"""Chooses preset, vocabulary, batch and length for a corpus, a machine and a number of hours, with the reasons."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil
import torch

from terakoya.config.parameters import Parameters
from terakoya.config.presets import presets_folder, read_preset
from terakoya.errors import UserError, nearest
from terakoya.json_settings import read_settings
from terakoya.toolkit.fast_products import Precision
from terakoya_planning import devices
from terakoya_planning.devices import Device
from terakoya_planning.estimate import Estimate, Measure, estimate, first_rank_batch, with_speed
from terakoya_planning.fake_step import model_sizes
from terakoya_planning.row_statistics import row_statistics
from terakoya_planning.speed import FORWARD_SHARE, Speed, planned_speed

Goal = Literal["try", "model"]


@dataclass(frozen=True)
class Recipe:
    """Presets of one recipe.

    Attributes:
        presets: their names, the smallest first.
        causal: whether each token is predicted from those before it, which is learned in fewer passes.
        spans: whether whole spans are predicted, for which the vocabulary has sentinels.
        reason: why it is the default.
        others: those of `presets` that have their authors' recipe instead, as none was compared at their size.
    """

    presets: tuple[str, ...]
    causal: bool = False
    spans: bool = False
    reason: str = ""
    others: tuple[str, ...] = ()

    def explain(self, preset: str) -> str:
        """Returns why `preset` has its recipe; nothing of one that the user has named."""
        return "By the recipe of its authors: none was compared at this size." if preset in self.others else self.reason


FAMILIES: Mapping[str, Recipe] = {
    "encoder": Recipe(
        ("tiny_modernbert", "bert_ja_small", "bert_ja", "bert_ja_base"),
        reason="Of the recipes compared it learns soonest: after 0.6 M tokens 21.6 % of masked tokens are right, with "
        "BERT and AdamW 7.9 %. --like bert is the paper's.",
    ),
    "electra": Recipe(
        ("tiny_electra_ja", "electra_ja_small", "electra_ja"),
        reason="Its discriminator learns sooner than the paper's: at toy size 0.23 on JSTS after 181 CPU seconds, the "
        "paper's 0.14 after 1,522. --like electra is the paper's.",
    ),
    "decoder": Recipe(
        ("gpt_ja_small", "gpt_ja", "llama_1b", "llama_8b"),
        causal=True,
        reason="Of the recipes compared it learns soonest: after 0.6 M tokens 19.4 % of next tokens are right, with "
        "GPT-2 and AdamW 11.5 %. --like gpt2 is GPT-2's.",
        others=("llama_1b", "llama_8b"),
    ),
    "t5": Recipe(("tiny_t5", "t5_base"), spans=True, others=("tiny_t5", "t5_base")),
}
"""What is trained -> the recipe measured best for it (docs/explanation/recipes.md)."""
PAPERS: Mapping[str, Recipe] = {
    "bert": Recipe(("tiny_bert", "bert_small", "bert_base", "bert_large")),
    "electra": Recipe(("tiny_electra", "electra_small", "electra_base")),
    "roberta": Recipe(("roberta_base",)),
    "deberta": Recipe(("deberta_base",)),
    "modernbert": Recipe(("tiny_modernbert", "modernbert_base")),
    "gpt2": Recipe(("tiny_gpt2", "gpt2_125m", "gpt2_300m"), causal=True),
    "llama": Recipe(("tiny_llama", "llama_1b", "llama_8b"), causal=True),
}
"""Model -> its authors' recipe."""

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
WHOLE_ALPHABET = ((200_000, 6000), (math.inf, 8000))
"""(characters below, pieces at least) of Japanese words in pieces, where each character takes two: with 4,000 pieces
2.2 to 2.9 % of the tokens of 0.3 to 1.5 million characters of Wikipedia are unknown, with 8,000 0.1 to 0.2 %."""

NO_STORE = "a store that is not made yet"
TRY_HOURS = 1 / 6
LEAST_STEPS = 5000
"""Below this number of steps a smaller batch is better: each step learns little more from a larger one."""
LEAST_TOKENS = 2048
"""Tokens of a step, below which it makes no smaller batch: the fewest for which sizes and rates were compared
(docs/reference/choosing.md)."""
MUON_RATE, SHORT_RUN = 9.0, 250
"""Muon's best learning rate, times the width and the cube root of the steps, in runs of at least so many steps of
`LEAST_TOKENS` tokens: seen with widths of 128 and 256 and 300 to 7,200 steps (tools/bench/README.md, "Rates of long
runs"). Bjorck et al. 2024 (arXiv:2409.19913) find nearly this power, 0.32, for AdamW."""
DECAY = {"decay_ratio": 0.2, "decay_type": "1-sqrt"}
"""How the rate falls where a preset's never does: in the last fifth, as good as any of the encoders' schedules compared
in docs/explanation/recipes.md, by the shape of Hägele et al. 2024 (arXiv:2405.18392)."""
CPU_SHARES = (0.1, 0.5)
"""The shares of the speed of a large matrix product that training is assumed to reach on a CPU, from small models to
large ones."""
MOST_TOKENS = 1e15
"""More than any run has."""
VALIDATION_SHARE, LEAST_BATCHES = 0.05, 10
"""The share of a run's time that its validations take, unless they need more for so many batches each."""
LEAST_STEPS_BETWEEN = 25
"""Steps between two validations or checkpoints, at least: in a run of 60 steps one after every third would take longer
than the training, and show noise."""
MOST_SECONDS_BETWEEN = 1800
"""Seconds between two checkpoints, at most, where the steps are no longer than expected: what a run that is killed has
lost. Validations are as often as long as they take no more than their share of the time."""


@dataclass(frozen=True)
class Machine:
    """What trains: `count` devices with weights in `precision`. `measure` measures the speed of a run, where the
    devices are here; None where they are not, or need not be asked."""

    device: Device
    count: int
    precision: Precision
    measure: Measure | None = None

    @property
    def name(self) -> str:
        """Such as `8 x h100`."""
        return f"{self.count} x {self.device.name}" if self.device.gpu else "this machine's CPU"

    def explain_precision(self) -> str:
        """Returns what a precision of "auto" is here."""
        return f"{self.precision} on {self.name}; another takes the fastest that it has."


def find_machine(gpu: str | None, count: int | None, *, measure: Measure | None = None) -> Machine:
    """Returns the machine with `count` times the device `gpu`; by default this machine, all its GPUs or its CPU, whose
    speed `measure` measures. Raises UserError if the device is unknown, or this machine has no GPU but several are
    wanted."""
    device = devices.find_device(gpu) if gpu else devices.local_device()
    if device.gpu:
        measure = measure if devices.is_here(device) else None
        if device.peak_tflops is None and measure is None:
            raise UserError(
                f"--gpu: the speed of {device.name} is unknown; measure it there, or name a similar one with as much "
                "memory, such as --gpu a100-80gb"
            )
        here = torch.cuda.device_count() if gpu is None else 1
        return Machine(device, count or here, devices.precision_on(device), measure)
    if count and count > 1:
        raise UserError(f"--gpus {count}: this machine has no GPU; name the kind with --gpu, such as --gpu h100")
    device = replace(device, memory=device.memory or psutil.virtual_memory().total)
    return Machine(device, 1, devices.precision_on(device), measure)


def _cpu_tflops() -> float:
    """Measures float32 matrix products of this machine's CPU for about a quarter of a second; TFLOP/s of the fastest,
    which other programs slow down least."""
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
    def hours(self) -> tuple[float, float]:
        """How long the run takes, predicted: the shortest and the longest time."""
        assert self.estimated.hours is not None, "its speed and its steps are known"
        return self.estimated.hours

    @property
    def passes(self) -> float:
        """How often the run passes over the corpus."""
        return self.trained_tokens / self.tokens


def choose_vocabulary(characters: int, language: str, *, causal: bool) -> int:
    """Returns the number of pieces for a corpus of so many characters. Those of a `causal` model are of SentencePiece,
    which writes rare characters in bytes."""
    least = WHOLE_ALPHABET if language == "ja" and not causal else ()
    return max(
        next(pieces for below, pieces in table if characters < below) for table in (VOCABULARIES, least) if table
    )


def count_tokens(characters: int, language: str) -> int:
    """Returns roughly how many tokens a text of so many characters has."""
    return max(1, round(characters / CHARACTERS_PER_TOKEN[language]))


def find_recipe(family: str | None, like: str | None) -> Recipe:
    """Returns the best recipe of `family`, by default of encoders, or that of the authors of the model `like`. Raises
    UserError if there is none."""
    if like is not None and family is not None:
        raise UserError("--family, --like: expected one of them: the best recipe of a family, or a paper's")
    if like is not None and like not in PAPERS:
        raise UserError(f"--like {like}: expected one of {', '.join(PAPERS)}{nearest(like, PAPERS)}")
    if family is not None and family not in FAMILIES:
        paper = f"; the recipe of its paper is --like {family}" if family in PAPERS else nearest(family, FAMILIES)
        raise UserError(f"--family {family}: expected one of {', '.join(FAMILIES)}{paper}")
    return PAPERS[like] if like is not None else FAMILIES[family or "encoder"]


def choose(
    *,
    tokens: int,
    vocabulary: int,
    recipe: Recipe,
    goal: Goal,
    machine: Machine,
    hours: float,
    held_out: int | None = None,
) -> Choice:
    """Returns the model of `recipe` whose loss is expected to be lowest after `hours`, of those for which `tokens`
    suffice, and its run, which takes no longer than `hours` even where its speed is the slowest of a range. `held_out`
    is the rough number of tokens for validation; None: as many as a validation reads. Raises UserError if not even the
    smallest model fits into the device's memory, or is fast enough for a measurement."""
    kind = "causal" if recipe.causal else "masked"
    hours = min(hours, TRY_HOURS) if goal == "try" else hours
    presets = recipe.presets[:1] if goal == "try" else recipe.presets
    limit = "goal" if goal == "try" else "family"
    candidates: list[Candidate] = []
    least = math.inf
    for preset in presets:
        candidate = Candidate.of(preset, read_settings(presets_folder() / f"{preset}.json"), vocabulary, machine)
        if candidates and tokens < UNIQUE_TOKENS_PER_PARAMETER[kind] * candidate.body:
            limit = "corpus"
            break
        trained = min(candidate.affordable(hours), PASSES[kind] * tokens)
        if not trained and not candidates:
            raise UserError(f"{preset}: a part of one step takes too long on {machine.name} to be measured")
        if not trained or (loss := expected_loss(candidate.body, trained)) > least:
            limit = "hours"
            break
        least = loss
        candidates.append(candidate)
    for candidate in reversed(candidates):
        choice = candidate.run_within(hours, PASSES[kind] * tokens, tokens, held_out)
        if choice is not None:
            return replace(choice, limit=limit)
        limit = "memory"
    raise UserError(f"not even {presets[0]} fits into the memory of {machine.name}")


def expected_loss(body: float, trained: float) -> float:
    """Returns what the loss of a model with `body` parameters outside the embeddings is expected to be after so many
    `trained` tokens, but for a constant: the fit of Besiroglu et al. 2024 (arXiv:2404.10102) to Chinchilla's causal
    models. It is used to compare sizes; docs/reference/choosing.md has what was measured of encoders beside it."""
    return 482.01 / body**0.3478 + 2085.43 / trained**0.3658


@dataclass(frozen=True)
class Candidate:
    """A preset, or another model, whose run may be chosen.

    Attributes:
        raw: its parameters, without its stores.
        body: parameters outside of the embeddings.
        flops_per_token: of the whole model, forward and backward.
    """

    preset: str
    raw: Mapping[str, Any]
    vocabulary: int
    machine: Machine
    body: int
    flops_per_token: float

    @classmethod
    def of(cls, preset: str, raw: Mapping[str, Any], vocabulary: int, machine: Machine) -> Candidate:
        """Returns the candidate with the parameters `raw`, whose model is built without weights."""
        # not the store at the preset's path: the one that this pipeline makes will have another vocabulary
        data = {"train": [NO_STORE], "validation": [NO_STORE], "sequence_length": raw["data"]["sequence_length"]}
        raw = {**raw, "data": data}
        loaded = Parameters.from_dict(raw, source=preset)
        rows = row_statistics(loaded.data, loaded.objective.row_layout(), vocabulary)
        sizes = model_sizes(loaded, rows.vocabulary, context=rows.context)
        return cls(preset, raw, vocabulary, machine, sizes.parameters - sizes.embeddings, sizes.flops_per_token)

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return int(self.raw["data"]["sequence_length"])

    def affordable(self, hours: float) -> float:
        """Returns how many tokens are trained in so many `hours`, at least; 0 where that cannot be measured."""
        trained = MOST_TOKENS
        for _ in range(2):  # in the preset's batches, then in those of a run so short, which are slower
            raw = next(_runs(self.raw, trained=trained, machine=self.machine))
            if (speed := self.speed(raw)) is None:
                return 0.0
            trained = hours * 3600 / speed.high * sum(raw["batch_size"].values()) * self.length
        return trained

    def run_within(self, hours: float, trained: float, tokens: int, held_out: int | None) -> Choice | None:
        """Returns `run` over at most `trained` tokens in at most so many `hours`."""
        trained = min(self.affordable(hours), trained)
        for _ in range(3):  # small batches and validations take time, too
            choice = self.run(trained, tokens, held_out)
            if choice is None or choice.hours[1] <= hours:
                break
            trained *= hours / choice.hours[1]
        return choice

    def speed(self, raw: Mapping[str, Any]) -> Speed | None:
        """Returns the speed of the run `raw`; None where it is too slow to be measured."""
        machine, parameters = self.machine, Parameters.from_dict(raw, source=self.preset)
        share = first_rank_batch(
            parameters.batch_size, parameters.micro_batch_size, replica_size=1, processes=machine.count
        )
        if machine.measure is not None and (
            (measured := machine.measure(parameters, self.vocabulary, share, machine.count)) or not machine.device.gpu
        ):
            return measured
        flops = self.flops_per_token * share.global_rows * self.length
        if machine.device.gpu:
            return planned_speed(parameters, machine.device, processes=machine.count, share=share, flops_per_step=flops)
        low, high = (flops / (each * _cpu_tflops() * 1e12) for each in reversed(CPU_SHARES))
        said = f"assumed, not measured: {CPU_SHARES[0]:.0%} to {CPU_SHARES[1]:.0%} of the speed of a large product here"
        return Speed(low, high, FORWARD_SHARE, "range", said)

    def run(self, trained: float, tokens: int, held_out: int | None) -> Choice | None:
        """Returns the run over `trained` tokens that fits into memory with the largest micro-batch; None: none does."""
        validated, device = None if held_out is None else -(-held_out // self.length), self.machine.device
        for raw in _runs(self.raw, trained=trained, machine=self.machine):
            if (speed := self.speed(raw)) is not None:
                most = max(LEAST_STEPS_BETWEEN, int(MOST_SECONDS_BETWEEN / speed.high))
                rare = math.ceil(raw["evaluation"]["batches"] * FORWARD_SHARE / VALIDATION_SHARE)
                for name, key, steps in (("checkpoint", "save_steps", most), ("evaluation", "steps", max(most, rare))):
                    raw[name] = {**raw[name], key: min(steps, raw[name][key])}
            parameters = Parameters.from_dict(raw, source=self.preset)
            estimated = estimate(
                parameters, processes=self.machine.count, vocab_size=self.vocabulary,
                device=device.name if device.peak_tflops or not device.gpu else None,
            )  # fmt: skip
            estimated = replace(estimated, device=device)
            if estimated.fits is not False and speed is not None:
                estimated = with_speed(estimated, speed, parameters, validated)
                done = raw["max_steps"] * sum(raw["batch_size"].values()) * self.length
                return Choice(self.preset, {**raw, "precision": "auto"}, self.vocabulary, tokens, done, estimated, "")
        return None


def least_rows(length: int) -> int:
    """Returns how many rows of `length` tokens a step of a short run has at least."""
    return -(-LEAST_TOKENS // length)


def _runs(preset: Mapping[str, Any], *, trained: float, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields runs of `preset` over `trained` tokens, each needing less memory than the one before."""
    rows = preset_rows = sum(preset["batch_size"].values())
    length = preset["data"]["sequence_length"]
    least = least_rows(length)
    while rows > least and trained / (rows * length) < LEAST_STEPS:
        rows = max(least, rows // 2)
    rows = max(rows, machine.count)
    steps = max(1, round(trained / (rows * length)))
    own_rate = preset["optimizer"]["learning_rate"]
    scale = math.sqrt(rows / preset_rows)
    if preset["optimizer"]["type"] == "muon":
        small = MUON_RATE / preset["architecture"]["hidden_size"] / max(steps, SHORT_RUN) ** (1 / 3)
        # the root of the batch is Adam's rule (Malladi et al. 2022): up to the preset's rate, for Muon was not tried
        scale = min(small * math.sqrt(rows / least), max(small, own_rate)) / own_rate
    rate = _round_to_two_digits(own_rate * scale)
    schedule = dict(preset["schedule"])
    if schedule["type"] == "constant":  # a trunk, which other runs end
        schedule |= {"type": "warmup_stable_decay", **DECAY}
    schedule["warmup_steps"] = min(schedule.get("warmup_steps", steps), steps // 10)
    if "min_lr" in schedule:
        schedule["min_lr"] = min(_round_to_two_digits(schedule["min_lr"] * scale), rate / 10)
    base = {key: value for key, value in preset.items() if key != "max_tokens"}
    base |= {
        "optimizer": {**preset["optimizer"], "learning_rate": rate},
        "schedule": schedule,
        "batch_size": {"-1": rows},
        "max_steps": steps,
        "precision": machine.precision,
        "checkpoint": {**preset["checkpoint"], "save_steps": _interval(steps, 10)},
        "evaluation": {**preset["evaluation"], **_validations(steps, preset["evaluation"]["batches"])},
        "logging_steps": min(50, max(1, steps // 200)),
    }
    share = -(-rows // machine.count)
    micro = min(share, 64 if machine.device.gpu else 16)
    for engine in ("ddp", "fsdp") if machine.count > 1 else ("ddp",):
        size = micro
        while size >= 1:
            yield {**base, "parallel": {"engine": engine}, "micro_batch_size": size}
            size //= 4 if size > 4 else 2


def _validations(steps: int, most: int) -> dict[str, int]:
    """Returns the steps between two validations, and the batches of each, at most `most`."""
    batches = VALIDATION_SHARE / FORWARD_SHARE * steps
    parts = 20 if batches >= 20 * most else 10
    return {"steps": _interval(steps, parts), "batches": min(most, max(LEAST_BATCHES, int(batches / parts)))}


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
