"""What a device multiplies fast is asked of torch; what it multiplies slowly is warned of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from terakoya.toolkit import fast_products
from terakoya.toolkit.fast_products import (
    describe_processor,
    fastest_precision,
    multiplies_fast,
    precision_problems,
)
from terakoya_plugins.optimizers.muon import batched

CPU = torch.device("cpu")

MUON_THERE = """
import json, time, torch
from terakoya.toolkit.fast_products import describe_processor, multiplies_fast
from terakoya_plugins.optimizers.muon.batched import orthogonalize

def fastest(call):
    seconds = []
    for _ in range(5):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)

def products():
    for _ in range(5):
        square = matrices @ matrices.mT
        square @ square
        square @ matrices

cpu, matrices = torch.device("cpu"), torch.ones(8, 128, 384)
print(json.dumps({
    "bf16": multiplies_fast("bf16", cpu), "fp16": multiplies_fast("fp16", cpu), "name": describe_processor(cpu),
    "products": fastest(products),
    "orthogonalize": fastest(lambda: orthogonalize(matrices, (3.4, -4.8, 2.0), steps=5, eps=1e-7)),
}))
"""


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """Forgets what this machine has answered, before and after a test."""
    multiplies_fast.cache_clear()
    yield
    multiplies_fast.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, *, capability: str, bf16: bool, allowed: str = "ALL") -> None:
    """Makes torch see an x86 processor with these instructions."""
    monkeypatch.setattr(fast_products.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)


@pytest.mark.parametrize(
    ("capability", "bf16", "allowed", "fast"),
    [
        ("AVX2", False, "ALL", False),
        ("AVX2", True, "ALL", False),  # ATEN_CPU_CAPABILITY=avx2 on a newer processor
        ("AVX512", False, "ALL", False),
        ("AVX512", True, "ALL", True),
        ("AVX512", True, "avx512_core_amx", True),
        ("AVX512", True, "AVX2", False),  # oneDNN may not use what there is
        ("AVX512", True, "AVX512_CORE", False),
    ],
)
def test_bf16_is_fast_where_torch_and_onednn_have_instructions(
    monkeypatch: pytest.MonkeyPatch, capability: str, bf16: bool, allowed: str, fast: bool
) -> None:
    pretend(monkeypatch, capability=capability, bf16=bf16, allowed=allowed)
    assert multiplies_fast("bf16", CPU) is fast
    assert fastest_precision(CPU) == ("bf16" if fast else "fp32")


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bf16_is_fast_on_gpus_since_ampere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fast: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert multiplies_fast("bf16", torch.device("cuda", 0)) is fast
    assert multiplies_fast("fp16", torch.device("cuda", 0))
    assert fastest_precision(torch.device("cuda", 0)) == ("bf16" if fast else "fp16")


def test_a_slow_precision_is_warned_of_with_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability="AVX2", bf16=False)
    monkeypatch.setattr(fast_products, "slowdown", lambda precision, device: 29.6)
    assert list(precision_problems("fp32", CPU)) == []
    (warning,) = precision_problems("bf16", CPU)
    assert warning == f"{describe_processor(CPU)} multiplies bf16 30 times slower than fp32; use fp32 here"
    monkeypatch.setattr(fast_products, "slowdown", lambda precision, device: 1.1)
    assert list(precision_problems("bf16", CPU)) == [], "as a processor without instructions of its own may be"


@pytest.mark.parametrize("fast", [True, False])
def test_muon_orthogonalises_in_the_precision_that_is_fast(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """In float32 within its rounding of float64's update, in bf16 within bf16's."""
    pretend(monkeypatch, capability="AVX512" if fast else "AVX2", bf16=True)
    gradient = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    matrix = nn.Parameter(torch.zeros(12, 8))
    matrix.grad = gradient
    batched.BatchedMuon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    each = gradient.double().T / gradient.double().norm()
    for _ in range(5):
        square = each @ each.T
        each = 3.4445 * each + (-4.7750 * square + 2.0315 * square @ square) @ each
    update = -0.2 * 12**0.5 * each.T
    error = ((matrix.detach() - update).norm() / update.norm()).item()
    assert error < 1e-5 if not fast else 1e-4 < error < 0.03


def test_a_processor_with_avx2_alone_can_be_imitated() -> None:
    """With the variables that oneDNN and torch read, a newer processor decides as an older one, and Muon's products
    take about as long as float32's; in bf16 they would take 20 times as long or more."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("no processor with AVX2")
    imitated = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", MUON_THERE], env={**os.environ, **imitated}, capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    assert (found["bf16"], found["fp16"]) == (False, False) and found["name"].endswith("(AVX2)")
    assert found["orthogonalize"] < 5 * found["products"]
