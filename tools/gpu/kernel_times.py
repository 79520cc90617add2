"""How fast this card copies and multiplies, and what kernels of attention take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from settings import Measurement, Settings
from torch import Tensor

from terakoya.toolkit.architectures import attention

PRODUCTS = ((16_384, 768, 3072), (16_384, 768, 768), (8192, 8192, 8192))
"""Rows, inner size and columns of bf16 products: those of a block of BERT-base, and one that fills any card."""
TINY_PRODUCTS = ((64, 64, 64),)


def copy_rate(settings: Settings) -> Measurement:
    """Returns the rate at which the device copies its memory, bytes read and written."""
    size = 2**20 if settings.tiny else 2**31
    source = torch.zeros(size, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    seconds = time_of(partial(target.copy_, source), settings.device)
    return {"what": "copy", "bytes": 2 * size, "terabytes_per_second": 2 * size / seconds / 1e12}


def product_rates(settings: Settings) -> Iterator[Measurement]:
    """Yields the rate of each product."""
    for rows, inner, columns in TINY_PRODUCTS if settings.tiny else PRODUCTS:
        sizes = ((rows, inner), (inner, columns))
        left, right = (torch.randn(*size, device=settings.device).bfloat16() for size in sizes)
        seconds = time_of(partial(torch.matmul, left, right), settings.device)
        operations = 2 * rows * inner * columns
        yield {"what": "product", "shape": [rows, inner, columns], "tflops": operations / seconds / 1e12}


@cache
def product_ceiling(settings: Settings) -> float:
    """Returns the best of the product rates, in TFLOP/s: the ceiling of every rate of training on this device."""
    best = max(float(each["tflops"]) for each in product_rates(settings))
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def boundaries(settings: Settings) -> Iterator[Measurement]:
    """Yields what room for documents that are not there costs flash attention, and what torch's masked one takes."""
    tokens, heads, size = (512, 2, 16) if settings.tiny else (16_384, 12, 64)
    count = tokens // 208
    device, scalar = settings.device, torch.float32 if settings.tiny else torch.bfloat16
    draw = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=draw)[: count - 1].sort().values + 1
    longest = tokens // 32

    def states(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, device=device, dtype=scalar, requires_grad=True) for _ in range(3)]

    if not settings.tiny:
        from torch.nn.attention.varlen import varlen_attn

        for room in (count, 128, 512, 2048, 8192, 16_384):
            edges = torch.full((room + 1,), tokens, dtype=torch.int32)
            edges[:count] = torch.cat([torch.zeros(1, dtype=torch.int32), cuts.int()])
            edges = edges.to(device)
            flat = states(tokens, heads, size)
            yield {
                "kernel": "varlen", "room": room,
                **both_ways(partial(varlen_attn, *flat, edges, edges, tokens, tokens), flat, device),
            }  # fmt: skip
    rows = states(32, heads, longest, size)
    document_ids = torch.arange(longest, device=device).div(208, rounding_mode="floor").expand(32, -1)
    mask = attention.document_mask(document_ids)
    for name, given in {
        "masked": {"attn_mask": mask},
        "masked, dropout 0.1": {"attn_mask": mask, "dropout_p": 0.1},
        "masked, dropout 1/16": {"attn_mask": mask, "dropout_p": 1 / 16},
        "whole rows": {},
        "causal": {"is_causal": True},
    }.items():
        call = partial(F.scaled_dot_product_attention, *rows, **given)
        yield {"kernel": f"sdpa, {name}", **both_ways(call, rows, device)}


def both_ways(call: Callable[[], Tensor], states: list[Tensor], device: torch.device) -> dict[str, float]:
    """Returns the milliseconds and the peak memory of `call` and its backward."""

    def step() -> None:
        for each in states:
            each.grad = None
        call().sum().backward()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = time_of(step, device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"milliseconds": 1000 * seconds, "gigabytes": peak / 1e9}


def time_of(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the median seconds of a call, after three that warm up: on a GPU in 0.3 seconds, on a CPU of three."""
    for _ in range(3):
        call()
    times: list[float] = []
    end = time.perf_counter() + (0.3 if device.type == "cuda" else 0.0)
    while time.perf_counter() < end or len(times) < 3:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
