"""How fast this card copies and multiplies, and what attention and the gradients of embeddings take."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contestants import loaded_rows
from settings import Case, Measurement, Settings
from torch import Tensor, nn

from terakoya.toolkit.architectures import attention as rules
from terakoya.toolkit.architectures._attention_backends import flash, sdpa
from terakoya.training.model import determinism
from terakoya_precision.bf16_functions import embedding_gradient

PRODUCTS = ((16_384, 768, 3072), (16_384, 768, 768), (8192, 8192, 8192))
"""Rows, inner size and columns of bf16 products: those of a block of BERT-base, and one that fills any card."""
ATTENTION = (Case("bert_base"), Case("bert_large"), Case("gpt2_125m"), Case("llama_8b"))


def copy_rate(settings: Settings) -> Measurement:
    """Returns the rate at which the device copies its memory, bytes read and written."""
    size = 2**20 if settings.tiny else 2**31
    source = torch.zeros(size, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    seconds = time_of(partial(target.copy_, source), settings.device)
    return {"what": "copy", "bytes": 2 * size, "terabytes_per_second": 2 * size / seconds / 1e12}


def product_rates(settings: Settings) -> Sequence[Measurement]:
    """Returns the rate of each product, measured once: other processes with the same folder `work` read it there."""
    file, device = settings.work / "products.json", settings.device
    if not file.exists():
        rates = []
        for rows, inner, columns in [(64, 64, 64)] if settings.tiny else PRODUCTS:
            left, right = (torch.randn(*size, device=device).bfloat16() for size in ((rows, inner), (inner, columns)))
            tflops = 2 * rows * inner * columns / time_of(partial(torch.matmul, left, right), device) / 1e12
            rates.append({"what": "product", "shape": [rows, inner, columns], "tflops": tflops})
        file.write_text(json.dumps(rates))
    found: list[Measurement] = json.loads(file.read_text())
    return found


def product_ceiling(settings: Settings) -> float:
    """Returns the best of the product rates, in TFLOP/s: the ceiling of every rate of training on this device."""
    return max(float(each["tflops"]) for each in product_rates(settings))


def attention(settings: Settings) -> Iterator[Measurement]:
    """Yields what attention takes in a block of some presets, on the documents of a run's first micro-step, and of one
    document of 4,096 tokens: flash as runs call it, flash with room for the documents that are there alone, and sdpa
    with a mask; deterministic and any."""
    for case in ATTENTION:
        raw = case.parameters(settings)
        yield from attention_to(settings, raw, {"preset": case.preset}, next(loaded_rows(raw, 1)).document_ids)
    one: np.ndarray = np.zeros((1, 64 if settings.tiny else 4096), np.int32)
    yield from attention_to(settings, raw, {"preset": case.preset, "what": "one document"}, one)


def attention_to(
    settings: Settings, raw: Mapping[str, Any], named: Measurement, document_ids: np.ndarray
) -> Iterator[Measurement]:
    """Yields the times of each kind of attention of the run `raw` to the documents `document_ids` (B, T). A toy has no
    flash attention."""
    sizes, (rows, length) = raw["architecture"], document_ids.shape
    heads, causal = sizes["num_attention_heads"], raw["objective"]["type"] == "causal_lm"
    shared, size = sizes.get("num_key_value_heads", heads), sizes["hidden_size"] // heads
    dtype = torch.float32 if settings.tiny else torch.bfloat16
    states = [torch.randn(rows, length, count, size, device=settings.device, dtype=dtype, requires_grad=True)
              for count in (heads, shared, shared)]  # fmt: skip
    starts, longest = rules.boundaries(document_ids)
    documents = int((starts < rows * length).sum())
    ids = torch.from_numpy(document_ids).to(settings.device)
    kinds: dict[str, Callable[..., Any]] = {
        "sdpa, masked": partial(sdpa, document_mask=(rules.causal_mask if causal else rules.document_mask)(ids))
    }
    for room in () if settings.tiny else sorted({documents, len(starts) - 1}):
        edges = np.r_[starts[:documents], [rows * length] * (room + 1 - documents)].astype(np.int32)
        kinds[f"flash, room {room}"] = partial(
            flash, cu_seqlens=torch.from_numpy(edges).to(settings.device), longest_document=torch.empty(longest, 0),
            causal=causal,
        )  # fmt: skip
    case = {"rows": rows, "length": length, "documents_in_rows": documents, "longest": longest}
    for (kernel, kind), deterministic in itertools.product(kinds.items(), (True, False)):
        determinism.choose(deterministic=deterministic)

        def attend(kind: Callable[..., Any] = kind) -> Tensor:
            attended: Tensor = kind(nn.Identity(), *(each.transpose(1, 2) for each in states), None)[0]
            return attended

        seen = both_ways(attend, states, settings.device)
        yield {**named, **case, "kernel": kernel, "deterministic": deterministic, **seen}


def embeddings(settings: Settings) -> Iterator[Measurement]:
    """Yields what the gradient of each table of embeddings takes: by the operation of the bf16 stream, and of the small
    tables by a product; deterministic."""
    tokens, width, words = (64, 16, 100) if settings.tiny else (16_384, 768, 32_768)
    device = settings.device
    gradient, places = torch.randn(tokens, width, device=device), torch.arange(tokens, device=device)
    ids = {"words": torch.randint(words, (tokens,), device=device), "positions": places % 512, "types": places * 0}
    determinism.choose(deterministic=True)
    for table, of_table in ids.items():
        rows = {"words": words, "positions": 512, "types": 2}[table]
        ways: dict[str, Callable[[], Tensor]] = {"operation": partial(embedding_gradient, gradient, of_table, rows, -1)}
        if table != "words":
            ways["product"] = partial(embedding_product, gradient, of_table, rows)
        for way, call in ways.items():
            yield {"kernel": f"gradient of {table}, {way}", "milliseconds": 1000 * time_of(call, device)}


def embedding_product(gradient: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Returns `embedding_gradient` of a table of few rows by a product, (rows, H) in bf16."""
    return F.one_hot(ids, rows).to(torch.bfloat16).t() @ gradient.to(torch.bfloat16)


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
