"""Fused kernels: right in Triton's interpreter, machine code for every GPU, and taken only where all ranks can."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreted_kernels
import pytest
import torch
import toy
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from terakoya.config.parameters import Parameters
from terakoya.training.engines.ddp import DDPEngine, gradient_divisor
from terakoya.training.setup import train_in_this_process
from terakoya_precision.bf16_stream import WeightCopies, fused_widths
from terakoya_precision.fused import choice, self_check

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
BITS = {"bfloat16": 8, "float32": 24}
EVERY_SUM = {"sum_norm": 4, "sum_norm_backward": 4}
EVERY_PRODUCT = {"join": 2, "add_product_": 4}
WITH_GELU = {**EVERY_SUM, **EVERY_PRODUCT, "gelu_backward": 2, "column_sums": 8}
CALLS: Mapping[str, Mapping[str, int]] = {
    "bert": WITH_GELU,
    "roberta": WITH_GELU,
    "electra": WITH_GELU,
    "deberta_v2": {**EVERY_SUM, "column_sums": 4},
    "silu": {**EVERY_SUM, **EVERY_PRODUCT, "column_sums": 6},
}
"""How often two blocks of each model take each operation."""


def check_kernel(name: str, seen: Mapping[str, Any]) -> None:
    """Errors are those of one rounding; sums of rounded values may lose some more, of one value up to 2."""
    _, rows, width, dtype, *dropout = name.split()
    unit = 2.0 ** -BITS[dtype]
    assert max(seen["errors"].values()) <= (2 if dtype == "bfloat16" else 10) * unit, (name, seen["errors"])
    assert seen["same mask"] and seen["same bits"], name
    share = float(dropout[0]) if dropout else 0.0
    sigma = (share * (1 - share) / (int(rows) * int(width))) ** 0.5
    assert abs(seen["kept"] - (1 - share)) <= 4 * sigma, name


@needs_triton
def test_the_kernels_are_right_in_triton_s_interpreter() -> None:
    seen = interpreted_kernels.take(
        {
            "rows": [7], "widths": [100], "dtypes": ["bfloat16", "float32"], "models": ["bert"],
            "blocks": ["selective"], "check": True,
        }
    )  # fmt: skip
    check_all(seen)
    # StableAdamW's update is that of float64 formulas, and goes on from its state with the same bits
    optimizer = seen["stable_adamw"]
    assert max(optimizer["errors"].values()) < 1e-6 and optimizer["same bits"]
    # a check that says of wrong kernels what is wrong with them
    check = seen["check"]
    assert check.pop("right") is None
    assert {name: check[name].split(",")[0] for name in check} == {
        "scale": "result 0 of sum_norm is off by 11.96%",
        "mask": "the backward does not drop what the forward dropped",
        "share": "dropout 0.25 keeps 0.5375",
        "sums": "result 2 of sum_norm_backward is off by 100.00%",
        "error": "RuntimeError: no code for this device",
    }


@needs_triton
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_kernels_are_right_at_every_size_and_in_every_family() -> None:
    whole = {"rows": [1, 7, 300], "widths": [64, 128, 768, 1000, 1024], "dtypes": list(BITS)}
    blocks = ["again", "full", "selective", "graph"]
    check_all(interpreted_kernels.take({**whole, "models": list(CALLS), "blocks": blocks, "check": False}))
    many = {"rows": [4096], "widths": [64, 768], "dtypes": ["bfloat16"]}
    check_all(interpreted_kernels.take({**many, "models": [], "blocks": [], "check": False}))


def check_all(seen: Mapping[str, Any]) -> None:
    for name, each in seen["kernels"].items():
        check_kernel(name, each)
    dropped = seen["all dropped"]
    assert dropped["kept"] == 0.0 and max(dropped["errors"].values()) < 2**-7
    for name, each in seen["models"].items():
        assert each["calls"] == CALLS[name]
        assert each["seeds"] == 4 and each["widths"] == [32]
        assert max(each["errors"].values()) < 0.02, name
    assert all(seen["blocks"].values()), seen["blocks"]


@needs_triton
@pytest.mark.nightly
def test_the_kernels_are_machine_code_of_every_gpu_without_spilling() -> None:
    import compiled_kernels

    for width in compiled_kernels.WIDTHS:
        for name, *kernel in compiled_kernels.kernels(width):
            for gpu, capability in compiled_kernels.GPUS.items():
                code, usage = compiled_kernels.compile_kernel(*kernel, capability)
                assert code.startswith(b"\x7fELF") and usage.spilled == 0, (name, width, gpu)
                # two programs fit on a multiprocessor, one of the widest rows
                assert usage.registers * 32 * kernel[-1]["num_warps"] <= 65536 // (1 if width == 4096 else 2), name


class Ranks:
    """A context of ranks whose answers are given."""

    def __init__(self, *others: str | None, device: str = "cuda") -> None:
        self.others, self.device, self.world_size = others, torch.device(device), 1 + len(others)

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def bert(**sizes: Any) -> BertModel:
    small = {
        "vocab_size": 8,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    return BertModel(BertConfig(**{**small, **sizes}))


def test_kernels_are_taken_on_all_ranks_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = bert(), []
    monkeypatch.setattr(choice, "reason_against", lambda device, widths: asked.append(widths))
    assert choice.choose(model, Ranks(None, None), setting="auto") == (True, None)  # type: ignore[arg-type]
    assert choice.choose(model, Ranks(None, "a reason"), setting="auto") == (False, "rank 2: a reason")  # type: ignore[arg-type]
    assert asked == [[32], [32]]
    # without a question: switched off, no GPU, no part that takes them
    assert choice.choose(model, Ranks(), setting="off") == (False, None)  # type: ignore[arg-type]
    assert choice.choose(model, Ranks(device="cpu"), setting="auto") == (False, None)  # type: ignore[arg-type]
    llama = LlamaModel(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    assert choice.choose(llama, Ranks(), setting="auto") == (False, None)  # type: ignore[arg-type]
    assert len(asked) == 2
    monkeypatch.setattr(choice, "reason_against", lambda *_: "no compiler")
    assert choice.choose(model, Ranks(), setting="auto") == (False, "no compiler")  # type: ignore[arg-type]


def test_a_run_without_its_kernels_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def choose(module: nn.Module, context: Any, *, setting: str) -> tuple[bool, str | None]:
        asked.append(setting)
        return False, "a reason"

    monkeypatch.setattr(choice, "choose", choose)
    store = toy.make_store(tmp_path / "store", documents=20, seed=1)
    settings = toy.parameters(store, precision="bf16", max_steps=1, fused_kernels="off")
    for folder, change in (("stream", {}), ("autocast", {"autocast": True})):
        parameters = Parameters.from_dict({**settings, **change}, source="test")
        train_in_this_process(parameters, tmp_path / folder)
    assert asked == ["off"]  # autocast has no such kernels
    lines = map(json.loads, (tmp_path / "stream" / "metrics.jsonl").read_text().splitlines())
    warned = [each["text"] for each in lines if each["kind"] == "warning"]
    assert [text for text in warned if "kernels" in text] == ["fused kernels off: a reason"]
    (manifest,) = (tmp_path / "stream" / "checkpoints").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["world"]["fused_kernels"] is False


def test_a_machine_without_a_gpu_for_them_is_a_reason_and_no_error() -> None:
    assert self_check.failure(torch.device("cpu"), [32])
    with torch.device("meta"):
        assert fused_widths(bert(hidden_size=8192, num_attention_heads=1)) == []


def test_without_fused_kernels_no_operation_is_called() -> None:
    model = bert().train()
    WeightCopies(model)
    with interpreted_kernels.Calls() as calls, torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(8)[None]).last_hidden_state.sum().backward()
    assert not calls.counts


@pytest.mark.parametrize(("norm", "limit"), [(0.5, 1.0), (8.0, 1.0), (8.0, 0.0)])
def test_an_update_that_clips_is_that_of_clipped_gradients(norm: float, limit: float) -> None:
    """On a CPU, whose AdamW divides by `grad_scale`, too."""
    torch.manual_seed(1)
    layer = nn.Linear(6, 5)
    gradients = [torch.randn_like(each) for each in layer.parameters()]
    factor = norm / torch.cat([each.flatten() for each in gradients]).norm()
    exact = [each.detach().double().requires_grad_() for each in layer.parameters()]
    for parameter, other, gradient in zip(layer.parameters(), exact, gradients, strict=True):
        parameter.grad, other.grad = gradient * factor, (gradient * factor).double()
    expected = nn.utils.clip_grad_norm_(exact, limit or float("inf"))
    torch.optim.AdamW(exact, lr=0.1, eps=1.0).step()  # a large eps: the update depends on the gradients' size
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, eps=1.0, fused=True)
    engine = SimpleNamespace(trainable=list(layer.parameters()), max_grad_norm=limit, optimizer=optimizer)
    got = DDPEngine.clip_in_update(engine)  # type: ignore[arg-type]
    optimizer.step()
    torch.testing.assert_close(got.double(), expected)
    for parameter, other in zip(layer.parameters(), exact, strict=True):
        torch.testing.assert_close(parameter.detach().double(), other.detach(), rtol=1e-6, atol=1e-7)


def test_gradients_below_the_limit_are_divided_by_one() -> None:
    assert gradient_divisor(torch.tensor(0.5), 1.0) == 1.0
    assert gradient_divisor(torch.tensor(float("inf")), 1.0) == float("inf")  # such a step is skipped on the device
