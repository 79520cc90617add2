"""Parts B and C: the rates of encoders and decoders, beside Transformers' `Trainer` and beside the card's products."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contestants import Ours, Peer
from kernel_times import product_ceiling
from settings import Case, Measurement, Settings
from turns_at_device import Contestant, Enough, Outcome, alone, take_turns, warm_up

from terakoya.errors import UserError

SHIPPED = "as shipped"
PEER = "Trainer, compiled, same rows"
WARM_SHARE = 0.85
"""The share of a stage's time in which both sides must have warmed up."""
PROFILED, TOP_KERNELS = 3, 20

LLAMA_LAYERS = 32
DEPTHS = (2, 6)
"""Layers of Llama-8B that are measured to extrapolate all of them: both sides of the deeper one fit 80 GB at once."""


def beside_trainer(settings: Settings, *, case: Case) -> Iterator[Measurement]:
    """Yields the case as it is shipped and the compiled `Trainer` on the same rows, which take turns."""
    sides = {SHIPPED: our_side(settings, case), PEER: trainer_side(settings, case)}
    yield from compared(settings, case, sides)


def documents(settings: Settings, *, case: Case) -> Iterator[Measurement]:
    """Yields the case beside two further `Trainer`s: on our rows, not compiled, and on their documents, padded."""
    sides: dict[str, Contestant] = {
        SHIPPED: our_side(settings, case),
        "Trainer, not compiled, same rows": trainer_side(settings, case, is_compiled=False),
        "Trainer, compiled, same documents padded": trainer_side(settings, case, form="documents"),
    }
    yield from compared(settings, case, sides)


def variants(settings: Settings, *, cases: Sequence[tuple[str, Case]]) -> Iterator[Measurement]:
    """Yields our rate of each case, with what it is called, in this process. A toy is not compiled, which takes minutes
    of a test, and has no CUDA graphs."""
    if settings.tiny:
        plain = {"compile": "off", "cuda_graphs": False}
        cases = [(label, replace(case, further={**case.further, **plain})) for label, case in cases]
    sides = [our_side(settings, case) for _, case in cases]
    if settings.warm:
        warm_up({str(number): side for number, side in enumerate(sides)}, settings.seconds)
        return
    product_ceiling(settings)
    for (label, case), side in zip(cases, sides, strict=True):
        yield measurement(settings, case, label, alone(side))


def llama_8b(settings: Settings, *, case: Case) -> Iterator[Measurement]:
    """Yields some layers of Llama-8B beside `Trainer`, and what follows for all: each layer takes the same time."""
    found: dict[str, list[Measurement]] = {SHIPPED: [], PEER: []}
    share = replace(settings, seconds=settings.seconds / len(DEPTHS))
    for depth in DEPTHS:
        of_depth = replace(case, architecture={**case.architecture, "num_hidden_layers": depth})
        sides = {SHIPPED: our_side(share, of_depth), PEER: trainer_side(share, of_depth)}
        for each in compared(share, of_depth, sides):
            yield {**each, "layers": depth}
            found[each["variant"]].append(each)
    if settings.warm:
        return
    first: Measurement = {}
    for label, depths in found.items():
        if any("tokens_per_second" not in each for each in depths):
            continue
        rate = 1 / extrapolated([1 / each["tokens_per_second"] for each in depths])
        flops = extrapolated([each["flops_per_token"] for each in depths])
        each = {
            **named(case, label, settings), "layers": LLAMA_LAYERS, "extrapolated": True, "tokens_per_second": rate,
            **of_products(settings, rate, flops),
        }  # fmt: skip
        first, each = first or each, with_ratio(each, first)
        yield each


def extrapolated(values: Sequence[float]) -> float:
    """Returns what all layers take, from `values` at the two DEPTHS."""
    layer = (values[1] - values[0]) / (DEPTHS[1] - DEPTHS[0])
    return values[0] + layer * (LLAMA_LAYERS - DEPTHS[0])


def whole_llama_8b(settings: Settings, *, case: Case) -> Iterator[Measurement]:
    """Yields the rate of all layers of Llama-8B where the memory of this card holds them, else how much they need."""
    from terakoya.config.parameters import Parameters
    from terakoya.estimation.estimate import estimate

    parameters = Parameters.from_dict(case.parameters(settings), source=case.preset)
    needed = estimate(parameters, device=None if settings.tiny else "H200", processes=1).memory.peak
    free = float("inf") if settings.tiny else torch.cuda.mem_get_info()[0]
    if needed > free:
        yield {**named(case, SHIPPED, settings), "needed_gigabytes": needed / 1e9, "free_gigabytes": free / 1e9}
        return
    yield {**measurement(settings, case, SHIPPED, alone(our_side(settings, case))), "layers": LLAMA_LAYERS}


def our_side(settings: Settings, case: Case) -> Ours:
    """Returns our side of the case."""
    work = Path(tempfile.mkdtemp(dir=settings.work))
    return Ours(case.parameters(settings), work, 1 if settings.tiny else case.window)


def trainer_side(settings: Settings, case: Case, **further: Any) -> Peer:
    """Returns the other side of the case; `further` are fields of `Peer`."""
    return Peer(case.parameters(settings), 1 if settings.tiny else case.window, on_cpu=settings.tiny, **further)


def compared(settings: Settings, case: Case, sides: Mapping[str, Contestant]) -> Iterator[Measurement]:
    """Yields a measurement of each side, the first of which is ours; of the others also how often ours is as fast."""
    if settings.warm:
        warm_up(sides, settings.seconds)
        return
    product_ceiling(settings)  # before another process is at the device
    first: Measurement = {}
    for label, outcome in take_turns(sides, apart=settings.apart, warm_seconds=WARM_SHARE * settings.seconds):
        if "flops_per_token" in first:  # the same work
            outcome = replace(outcome, facts={**outcome.facts, "flops_per_token": first["flops_per_token"]})
        each = with_ratio(measurement(settings, case, label, outcome), first)
        first = first or each
        yield each


def with_ratio(measurement: Measurement, ours: Measurement) -> Measurement:
    """Returns the `measurement` with how often the rate of `ours` is its own, where both are known."""
    if not {"tokens_per_second"} <= ours.keys() & measurement.keys():
        return measurement
    return {**measurement, "ours_over_this": ours["tokens_per_second"] / measurement["tokens_per_second"]}


def measurement(settings: Settings, case: Case, label: str, outcome: Outcome) -> Measurement:
    """Returns what an outcome says: tokens a second, their products beside this card's, and all facts of the run."""
    facts = dict(outcome.facts)
    if outcome.error:
        kind = "refused" if outcome.error.startswith(UserError.__name__) else "error"  # a run that says what it needs
        return {**named(case, label, settings), kind: outcome.error}
    counts = facts.pop("tokens")
    rates = [count / seconds for count, seconds in zip(counts, outcome.seconds, strict=True)]
    rate = statistics.median(rates)
    products = of_products(settings, rate, facts["flops_per_token"]) if "flops_per_token" in facts else {}
    return {
        **named(case, label, settings), "tokens_per_second": rate, **products,
        "spread": (max(rates) - min(rates)) / min(rates), **facts,
    }  # fmt: skip


def of_products(settings: Settings, rate: float, flops: float) -> Measurement:
    """Returns the useful operations a second of a `rate`, and their share of what this card's products reach."""
    tflops = rate * flops / 1e12
    return {"tflops": tflops, "product_share": tflops / product_ceiling(settings)}


def named(case: Case, label: str, settings: Settings) -> Measurement:
    """Returns which case a measurement is of."""
    raw = case.parameters(settings)
    rows, micro_steps = raw["micro_batch_size"], raw["batch_size"]["-1"] // raw["micro_batch_size"]
    return {
        "preset": case.preset, "rows": rows, "micro_steps": micro_steps, "length": raw["data"]["sequence_length"],
        "variant": label,
    }  # fmt: skip


class ProfileClock:
    """A clock for `ours.run` that profiles the last steps but one, and has `Enough` before the last, after which a run
    is saved."""

    def __init__(self, *, warm_up: int) -> None:
        self.warm_up, self.ended = warm_up, 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.warm_up + PROFILED + 1

    @property
    def done(self) -> bool:
        """Whether the profile has ended."""
        return self.ended >= self.warm_up + PROFILED

    def step_ended(self) -> None:
        """Begins and ends the profile. Raises Enough at its end."""
        self.ended += 1
        if self.ended == self.warm_up:
            self.profiler.__enter__()
        elif self.ended == self.warm_up + PROFILED:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
            raise Enough


def profiles(settings: Settings, *, cases: Sequence[tuple[str, Case]]) -> Iterator[Measurement]:
    """Yields the number and time of the kernels of a step of each case, with what it is called; a file has a table of
    the slowest."""
    import ours

    for label, case in cases:
        clock = ProfileClock(warm_up=1 if settings.tiny else 8)
        try:
            ours.run(case.parameters(settings), clock.steps, clock)
        except UserError:
            if not clock.done:  # its `Enough`, as the error of a plugin
                raise
        averages = clock.profiler.key_averages()
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        file = settings.out / f"profile-{case.preset}-{label.replace(' ', '-')}.txt"
        file.write_text(averages.table(sort_by=by, row_limit=TOP_KERNELS, max_name_column_width=80))
        on_card = [each for each in averages if each.device_type == torch.autograd.DeviceType.CUDA]
        kernels = on_card or list(averages)  # what starts a kernel has its time, too
        count, microseconds = sum(k.count for k in kernels), sum(k.self_device_time_total for k in kernels)
        yield {
            **named(case, label, settings), "kernels_per_step": count / PROFILED,
            "device_milliseconds_per_step": microseconds / 1000 / PROFILED,
        }  # fmt: skip
