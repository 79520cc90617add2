"""How long an optimizer step takes, and how that is known: measured here, measured on a card of that name, or a range.

A measured rate is one time. Where nothing was measured there is a range, from the fastest to the slowest that cards
have been seen to be beside their peak, which no single share of the peak could say.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

from terakoya.config.conflicts import takes_cuda_graphs
from terakoya.config.parameters import Parameters
from terakoya.config.presets import presets_folder
from terakoya.distributed.topology import RankBatch
from terakoya.errors import UserError
from terakoya_planning.devices import Device
from terakoya_planning.kept_rates import rate_facts
from terakoya_planning.probe import Probed

Source = Literal["run", "probe", "card", "range", "given", "formulas"]
"""Where a speed is from: an earlier run, steps that were timed here, a card's results, the shares of the peak that
cards have reached, an option, or the formulas for layouts of many GPUs."""

LEAST_STEP_SECONDS = (0.01, 0.04)
"""What a micro-step takes on any GPU, from fast to slow: the host starts hundreds or thousands of kernels, each in 5 to
10 microseconds."""
SEEN_SHARES = (0.12, 0.38)
"""The smallest and the largest share of its bfloat16 peak that an H200 was seen to reach: with BERT-large, once and
not again since, and with GPT-2 124M. Few models have been measured."""
FLOAT32_SHARES = (1 / 16, 0.42)
"""The speed of float32 without TF32 as a share of bfloat16's: the former is the ratio of an A100's peaks, the latter
was seen on an H200 in a small model, which waits for its host (tools/gpu/results)."""
FORWARD_SHARE = 1 / 3
"""The forward's share of the operations of forward and backward."""


@dataclass(frozen=True)
class Speed:
    """Seconds of an optimizer step, from `low` to `high`, which are equal unless the source is a range.

    Attributes:
        evaluation: what a global batch takes in a validation, as a share of a step; 0 where the validations are in the
            seconds of the steps, or left out, as in the formulas for layouts.
        said: in words, where the speed is from.
    """

    low: float
    high: float
    evaluation: float
    source: Source
    said: str


@dataclass(frozen=True)
class CardRate:
    """A rate that was measured on one card.

    Attributes:
        flops_per_token: operations of one token there, forward and backward.
        source: the folder of `tools/gpu/results`.
    """

    card: str
    preset: str
    rows: int
    length: int
    precision: str
    deterministic: bool
    cuda_graphs: bool
    tokens_per_second: float
    flops_per_token: float
    source: str

    @property
    def tflops(self) -> float:
        """TFLOP/s in necessary operations."""
        return self.tokens_per_second * self.flops_per_token / 1e12


@cache
def card_rates() -> tuple[CardRate, ...]:
    """Returns what was measured on cards, from `cards.csv`, which `tools/gpu/measured.py` writes."""
    text = files("terakoya_planning").joinpath("cards.csv").read_text(encoding="utf-8")
    return tuple(
        CardRate(
            row["card"], row["preset"], int(row["rows"]), int(row["length"]), row["precision"],
            row["deterministic"] == "true", row["cuda_graphs"] == "true", float(row["tokens_per_second"]),
            float(row["flops_per_token"]), row["source"],
        )
        for row in csv.DictReader(io.StringIO(text))
    )  # fmt: skip


def measured_speed(probed: Probed, share: RankBatch) -> Speed:
    """Returns the speed of a run whose steps were timed on this machine, in as many processes."""
    seconds = probed.rate.step(share.micro_steps)
    evaluation = share.micro_steps * probed.rate.evaluation / seconds
    return Speed(seconds, seconds, evaluation, "probe", f"measured on this machine, in steps of {probed.said}")


def speed_of_run(seconds: float, folder: object) -> Speed:
    """Returns the speed of a run as long as the one in `folder`, whose steps took `seconds`."""
    return Speed(seconds, seconds, 0.0, "run", f"measured on this machine, by the run in {folder}")


def describe_hours(hours: tuple[float, float]) -> str:
    """Returns a time or a range of times in words: `12 minutes`, `1.5–4.0 hours`."""

    def format_range(values: tuple[float, float], form: str) -> str:
        low, high = (format(value, form) for value in values)
        return low if low == high else f"{low}–{high}"

    low, high = hours
    if high < 1:
        return f"{format_range((60 * low, 60 * high), '.1f' if high < 1 / 6 else '.0f')} minutes"
    days = f" ({format_range((low / 24, high / 24), ',.1f')} days)" if high > 48 else ""
    return f"{format_range(hours, ',.1f')} hours{days}"


def planned_speed(
    parameters: Parameters, device: Device, *, processes: int, share: RankBatch, flops_per_step: float,
    mfu: float | None = None, tflops: float | None = None,
) -> Speed | None:  # fmt: skip
    """Returns the speed on devices that are not here; None where nothing is known of them, as of a CPU. `mfu` and
    `tflops` are what the user expects of a device, see `estimate`. Raises UserError if `mfu` is given for a device
    whose peak is unknown."""

    def at(low: float, high: float, source: Source, said: str) -> Speed:
        """Returns the speed of devices with `low` to `high` TFLOP/s."""
        fastest, slowest = (flops_per_step / (processes * each * 1e12) for each in (high, low))
        return Speed(fastest, slowest, FORWARD_SHARE, source, said)

    peak = device.peak_tflops
    if tflops is not None:
        return at(tflops, tflops, "given", f"with {tflops:,.3g} TFLOP/s of a device, as given")
    if mfu is not None:
        if peak is None:
            raise UserError(f"--mfu: the peak of {device.name} is unknown; give its speed instead: --tflops 0.05")
        return at(mfu * peak, mfu * peak, "given", f"with an MFU of {mfu:.2g}, as given")
    if peak is None:
        return None
    rate = _find_card_rate(parameters, device, processes)
    if rate is not None:
        others = "" if processes == 1 else f"; {processes} are assumed to be {processes} times as fast"
        return at(
            rate.tflops, rate.tflops, "card",
            f"measured on one {rate.card} ({rate.source}): {rate.tokens_per_second:,.0f} tokens/s of {rate.preset} "
            f"in rows of {rate.length}{others}",
        )  # fmt: skip
    low, high = SEEN_SHARES
    if parameters.precision == "fp32" and not parameters.tf32:
        low, high = low * FLOAT32_SHARES[0], high * FLOAT32_SHARES[1]
    said = f"not a measurement: {low:.0%} to {high:.0%} of the card's peak, as seen of other models on an H200"
    speed = at(low * peak, high * peak, "range", said)
    fastest, slowest = (each * share.micro_steps for each in LEAST_STEP_SECONDS)
    return replace(speed, low=max(fastest, speed.low), high=max(slowest, speed.high))


def _find_card_rate(parameters: Parameters, device: Device, processes: int) -> CardRate | None:
    """Returns what was measured of this model on a card with the name of `device`, computed in the same way."""
    for rate in card_rates():
        settings = (rate.precision, rate.deterministic, rate.cuda_graphs)
        if not device.is_named(rate.card) or settings != (
            parameters.precision, parameters.deterministic, takes_cuda_graphs(parameters, processes)
        ):  # fmt: skip
            continue
        preset = _preset(rate)
        facts = [rate_facts(each, vocab_size=0, rows=0, processes=1) for each in (preset, parameters)]
        if facts[0] == facts[1]:
            return rate
    return None


@cache
def _preset(rate: CardRate) -> Parameters:
    """Returns the parameters of which `rate` was measured."""
    changes = (
        f'precision="{rate.precision}"', f"deterministic={str(rate.deterministic).lower()}",
        f"cuda_graphs={str(rate.cuda_graphs).lower()}",
    )  # fmt: skip
    return Parameters.load(presets_folder() / f"{rate.preset}.json", changes)
