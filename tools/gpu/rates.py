"""The rates of runs beside the card's products, of ours alone or beside Transformers' `Trainer`, and their kernels."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from contestants import Form, Ours, Peer
from kernel_times import product_ceiling
from settings import Case, Measurement, Settings
from turns_at_device import WARM_UP, Clock, Contestant, Enough, Outcome, alone, take_turns

from terakoya.errors import UserError

PEERS: Mapping[Form, str] = {
    "rows": "Trainer, compiled, same rows", "documents": "Trainer, compiled, same documents padded",
}  # fmt: skip
WARM_SECONDS = 120.0
"""How long both sides may take to warm up."""
PROFILED, TOP_KERNELS = 3, 20

LLAMA_LAYERS = 32
DEPTHS = (2, 6)
"""Layers of Llama-8B that are measured to extrapolate all of them."""


def rate(settings: Settings, *, case: Case) -> Iterator[Measurement]:
    """Yields our rate of the case, measured alone in this process."""
    yield measurement(settings, case, case.label, alone(our_side(settings, case)))


def beside_trainer(settings: Settings, *, case: Case, forms: Sequence[Form] = ("rows",)) -> Iterator[Measurement]:
    """Yields the case and the compiled `Trainer` on each form of the same rows, which take turns; of `Trainer` also how
    often ours is as fast."""
    product_ceiling(settings)  # before another process is at the device
    sides: dict[str, Contestant] = {case.label: our_side(settings, case)}
    window = 1 if settings.tiny else case.window
    sides |= {PEERS[each]: Peer(case.parameters(settings), window, each, on_cpu=settings.tiny) for each in forms}
    rate, flops = 0.0, dict[str, float]()
    for label, outcome in take_turns(sides, apart=settings.apart, warm_seconds=WARM_SECONDS):
        each = measurement(settings, case, label, replace(outcome, facts={**flops, **outcome.facts}))
        if label == case.label and not outcome.error:
            rate, flops = each["tokens_per_second"], {"flops_per_token": each["flops_per_token"]}  # of the same work
        elif rate and not outcome.error:
            each = {**each, "ours_over_this": rate / each["tokens_per_second"]}
        yield each


def llama_8b(settings: Settings, *, case: Case) -> Iterator[Measurement]:
    """Yields the rates of some layers of Llama-8B, and what follows for all: each layer takes the same time. Nothing
    follows where more layers were not slower: steps so short that other programs decide their time."""
    found: list[Measurement] = []
    for depth in DEPTHS:
        of_depth = replace(case, architecture={**case.architecture, "num_hidden_layers": depth})
        found.append(measurement(settings, of_depth, case.label, alone(our_side(settings, of_depth))))
        yield {**found[-1], "layers": depth}
    rates = [each.get("tokens_per_second", 0.0) for each in found]
    if rates[0] > rates[1] > 0:
        few, more = ((1 / each["tokens_per_second"], each["flops_per_token"]) for each in found)
        further = (LLAMA_LAYERS - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
        seconds, flops = (one + further * (other - one) for one, other in zip(few, more, strict=True))
        yield {
            **named(case, case.label, settings), "layers": LLAMA_LAYERS, "extrapolated": True,
            "tokens_per_second": 1 / seconds, **of_products(settings, 1 / seconds, flops),
        }  # fmt: skip


def our_side(settings: Settings, case: Case) -> Ours:
    """Returns our side of the case."""
    work = Path(tempfile.mkdtemp(dir=settings.work))
    return Ours(case.parameters(settings), work, 1 if settings.tiny else case.window)


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
        **named(case, label, settings), "tokens_per_second": rate, "gpu_waits": facts.pop("gpu_waits", None),
        "spread": (max(rates) - min(rates)) / min(rates), **products, **facts,
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


def profile(settings: Settings, *, case: Case) -> Iterator[Measurement]:
    """Yields the number and time of the kernels of a step of the case; a file has a table of the slowest."""
    import ours

    profiler = torch.profiler.profile()

    def begin_or_end() -> None:
        if clock.seconds:
            profiler.__exit__(None, None, None)
            raise Enough
        profiler.__enter__()

    clock = Clock(PROFILED, begin_or_end)
    clock.warm_up = 1 if settings.tiny else WARM_UP
    try:
        ours.run(case.parameters(settings), clock.steps, clock)
    except UserError:
        if not clock.seconds:  # its `Enough`, as the error of a plugin
            raise
    averages = profiler.key_averages()
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    file = settings.out / f"profile-{case.preset}-{case.label.replace(' ', '-')}.txt"
    file.write_text(averages.table(sort_by=by, row_limit=TOP_KERNELS, max_name_column_width=80))
    on_card = [each for each in averages if each.device_type == torch.autograd.DeviceType.CUDA]
    kernels = on_card or list(averages)  # what starts a kernel has its time, too
    count, microseconds = sum(k.count for k in kernels), sum(k.self_device_time_total for k in kernels)
    yield {
        **named(case, case.label, settings), "kernels_per_step": count / PROFILED,
        "device_milliseconds_per_step": microseconds / 1000 / PROFILED,
    }  # fmt: skip
