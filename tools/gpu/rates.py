"""Parts B and C: tokens a second and memory of encoders and decoders, beside Transformers' `Trainer`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from settings import Measurement, Settings, Stage, preset

WARM_UP, WINDOWS, WINDOW = 8, 3, 20
"""Steps before the first window, windows, and steps of each."""
PROFILED = 3
TOP_KERNELS = 20


class WindowClock:
    """A clock for `ours.run`: the seconds of each window of steps, waiting for the device at its borders only."""

    def __init__(self, *, tiny: bool) -> None:
        self.warm_up, self.window = (1, 1) if tiny else (WARM_UP, WINDOW)
        self.steps = self.warm_up + WINDOWS * self.window
        self.ended = 0
        self.borders: list[float] = []

    def step_ended(self) -> None:
        """Notes a border's time."""
        self.ended += 1
        if self.ended >= self.warm_up and (self.ended - self.warm_up) % self.window == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.borders.append(time.perf_counter())

    def rates(self, tokens: Sequence[int]) -> list[float]:
        """Returns the tokens a second of each window; `tokens` are those of each step."""
        counts = [sum(tokens[start : start + self.window]) for start in range(self.warm_up, self.steps, self.window)]
        seconds = [after - before for before, after in zip(self.borders, self.borders[1:], strict=False)]
        return [count / each for count, each in zip(counts, seconds, strict=True)]


def rate(
    settings: Settings,
    name: str,
    rows: int,
    label: str,
    *,
    attention: str = "auto",
    compile: str = "auto",
    cuda_graphs: bool = False,
    **architecture: Any,
) -> Measurement:
    """Returns the rate of the preset `name` with `rows` rows in a micro-step. A toy has no graphs."""
    import ours

    raw = {**preset(name, settings, rows=rows, **architecture), "attention": attention, "compile": compile}
    raw["cuda_graphs"] = cuda_graphs and not settings.tiny
    clock = WindowClock(tiny=settings.tiny)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    facts = {"preset": name, "rows": rows, "variant": label, "length": raw["data"]["sequence_length"]}
    try:
        tokens, _ = ours.run(raw, clock.steps, clock)  # type: ignore[arg-type]
    except Exception as raised:  # noqa: BLE001 - what fails is a measurement, too, and the others follow
        return {**facts, "error": f"{type(raised).__name__}: {raised}"[:300]}
    rates = clock.rates(tokens)
    held = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        **facts, "tokens_per_second": statistics.median(rates), "spread": (max(rates) - min(rates)) / min(rates),
        "gigabytes": held / 1e9,
    }  # fmt: skip


def encoder(settings: Settings, *, name: str, sizes: Sequence[int]) -> Iterator[Measurement]:
    """The preset as it is shipped first, so that a run that is cut off has it; then without attention dropout."""
    exact = {"attention_probs_dropout_prob": 0.0}
    for number, rows in enumerate(sizes):
        if number == 0:
            yield rate(settings, name, rows, "as shipped")
            yield rate(settings, name, rows, "as shipped, not compiled", compile="off")
            yield rate(settings, name, rows, "no attention dropout, sdpa", attention="sdpa", **exact)
        yield rate(settings, name, rows, "no attention dropout", **exact)
    yield from profile(settings, name, sizes[0], exact)


def small(settings: Settings, *, name: str, sizes: Sequence[int]) -> Iterator[Measurement]:
    """The preset compiled whole, with CUDA graphs and without: the fewer rows, the more the host holds the GPU up."""
    whole = "off" if settings.tiny else "whole"  # compilation takes minutes of a test
    for rows in sizes:
        yield rate(settings, name, rows, "CUDA graphs", compile=whole, cuda_graphs=True)
        yield rate(settings, name, rows, "compiled whole", compile=whole)


def decoder(settings: Settings, *, name: str, sizes: Sequence[int], **architecture: Any) -> Iterator[Measurement]:
    """The preset as it is shipped, with rows of each of the `sizes`."""
    for rows in sizes:
        yield rate(settings, name, rows, "as shipped" if not architecture else f"with {architecture}", **architecture)
    yield rate(settings, name, sizes[0], "sdpa", attention="sdpa", **architecture)
    yield rate(settings, name, sizes[0], "not compiled", compile="off", **architecture)
    yield from profile(settings, name, sizes[0], architecture)


def peer(settings: Settings, *, rows: int) -> Iterator[Measurement]:
    """Transformers' `Trainer` on the same model: joined blocks and padded documents, eager and compiled."""
    import lines
    import peer as trainer
    import turns

    raw = preset("bert_base", settings, rows=rows, attention_probs_dropout_prob=0.0)
    length = raw["data"]["sequence_length"]
    data = lines.drawn(
        settings.work / "peer-tokenizer", count=200 if settings.tiny else 20_000, mean_length=length // 2,
        sequence_length=length, vocabulary_size=1000 if settings.tiny else 32_768,
    )  # fmt: skip
    framed = data.framed()
    steps, warm_up = (2, 1) if settings.tiny else (40, 8)
    run = partial(
        trainer.train, 0, raw, data.vocabulary, data.tokenizer_folder, steps=steps, warm_up=warm_up, bf16=True,
        use_cpu=settings.tiny,
    )  # fmt: skip
    for compiled in (False, True)[: 1 if settings.tiny else 2]:
        for label, sequences in (("joined blocks", trainer.blocks(framed, length)), ("padded documents", framed)):
            facts = {"preset": "bert_base", "rows": rows, "variant": f"Trainer, {label}", "compiled": compiled}
            try:
                turn: turns.Turn = run(sequences=sequences, torch_compile=compiled)
            except Exception as raised:  # noqa: BLE001 - see `rate`
                yield {**facts, "error": f"{type(raised).__name__}: {raised}"[:300]}
                continue
            yield {**facts, "tokens_per_second": turn.rate("wall")}


class ProfileClock:
    """A clock for `ours.run` that profiles the last steps but one."""

    def __init__(self) -> None:
        self.steps, self.ended = WARM_UP + PROFILED + 1, 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)

    def step_ended(self) -> None:
        """Begins and ends the profile."""
        self.ended += 1
        if self.ended == WARM_UP:
            self.profiler.__enter__()
        elif self.ended == WARM_UP + PROFILED:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)


def profile(settings: Settings, name: str, rows: int, architecture: Mapping[str, Any]) -> Iterator[Measurement]:
    """The kernels of some steps: a table in a file, and their number and time a step."""
    import ours

    clock = ProfileClock()
    ours.run(preset(name, settings, rows=rows, **architecture), clock.steps, clock)  # type: ignore[arg-type]
    averages = clock.profiler.key_averages()
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    file = Path(settings.out) / f"profile-{name}.txt"
    file.write_text(averages.table(sort_by=by, row_limit=TOP_KERNELS, max_name_column_width=80))
    kernels = [each for each in averages if each.self_device_time_total > 0] or list(averages)
    count, microseconds = sum(k.count for k in kernels), sum(k.self_device_time_total for k in kernels)
    yield {
        "preset": name, "rows": rows, "variant": "profile", "kernels_per_step": count / PROFILED,
        "device_milliseconds_per_step": microseconds / 1000 / PROFILED,
    }  # fmt: skip


ENCODERS: Mapping[str, Stage] = {
    "bert_base": Stage(partial(encoder, name="bert_base", sizes=(32, 64, 96)), 120.0),
    "trainer": Stage(partial(peer, rows=32), 150.0),
    "electra_small": Stage(partial(encoder, name="electra_small", sizes=(128, 512)), 80.0),
    "graphs": Stage(partial(small, name="electra_small", sizes=(32, 128, 512)), 110.0),
    "bert_large": Stage(partial(encoder, name="bert_large", sizes=(16, 32)), 110.0),
    "electra_base": Stage(partial(encoder, name="electra_base", sizes=(32, 64)), 90.0),
    "modernbert_base": Stage(partial(decoder, name="modernbert_base", sizes=(32,)), 60.0),
}
DECODERS: Mapping[str, Stage] = {
    "gpt2_125m": Stage(partial(decoder, name="gpt2_125m", sizes=(16, 32, 64)), 120.0),
    "llama_1b": Stage(partial(decoder, name="llama_1b", sizes=(2, 4)), 120.0),
    "llama_8b, 4 layers": Stage(partial(decoder, name="llama_8b", sizes=(2, 4), num_hidden_layers=4), 100.0),
    "llama_8b, 8 layers": Stage(partial(decoder, name="llama_8b", sizes=(2,), num_hidden_layers=8), 100.0),
}
