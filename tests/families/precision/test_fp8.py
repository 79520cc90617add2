"""fp8 on unsupported devices: refused at once, with the requirements."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy

from terakoya.components import ModuleBuild
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.toolkit.architectures import attention
from terakoya.training.engines.build import build
from terakoya.training.setup import train_in_this_process
from terakoya_contract.toy import VOCABULARY
from terakoya_parallel import engine as parallel
from terakoya_precision import fp8 as distributed_fp8

GPU = torch.device("cuda", 0)


def test_a_run_on_a_cpu_is_refused_before_anything_is_built(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("terakoya.training.setup.build_initial", None)
    settings = toy.parameters(store, precision="fp8")
    with pytest.raises(UserError, match=r'"fp8" needs a GPU of compute capability 8.9 or more .*, got cpu; use "bf16"'):
        train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path)


def test_an_older_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UserError, match=r"got NVIDIA A100 of 8\.0"):
        distributed_fp8.check(GPU)


def test_without_its_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r'"fp8": .*pip install "terakoya\[fp8\]"'):
        distributed_fp8.check(GPU)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(distributed_fp8, "_recipe", lambda: None)
    monkeypatch.setattr(distributed_fp8, "missing_tools", lambda device: "the package triton is not installed")
    with pytest.raises(UserError, match='"fp8" needs compiled blocks, and the package triton is not installed; use "'):
        distributed_fp8.check(GPU)


def test_layers_are_converted_before_fsdp_shards_them(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    monkeypatch.setattr(distributed_fp8, "convert", lambda module: happened.append(("converted", module)))
    monkeypatch.setattr(parallel, "ParallelEngine", lambda inputs: happened.append(("sharded", inputs.module)))
    module = torch.nn.Linear(2, 2)
    two: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    for precision in ("fp8", "bf16"):
        raw = toy.parameters(store, precision=precision, parallel={"engine": "fsdp"})
        run = ModuleBuild(Parameters.from_dict(raw, source="test"), VOCABULARY, two)
        build(module, run, micro_steps=1, micro_batch_size=1)
    assert happened == [("converted", module), ("sharded", module), ("sharded", module)]


def test_weights_keep_their_names_and_train_where_torchao_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    float8 = pytest.importorskip("torchao.float8", reason='needs `pip install "terakoya[fp8]"`')
    from accelerate.utils import AORecipeKwargs

    pretended = AORecipeKwargs(config=float8.Float8LinearConfig(pad_inner_dim=True, emulate=True))
    monkeypatch.setattr(distributed_fp8, "_recipe", lambda: pretended)
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    architecture: Any = registry().component("architectures", "llama")(**llama)
    module: Any = registry().component("objectives", "causal_lm")(layout="stream").build(architecture, VOCABULARY)
    weights = dict(module.named_parameters())
    distributed_fp8.convert(module)
    assert all(value is weights[name] for name, value in module.named_parameters(remove_duplicate=False))
    assert type(module.model.lm_head) is torch.nn.Linear, "the last layer stays as it is"
    attention.use(module, "sdpa")
    ids = torch.arange(32).repeat(2, 1)
    batch = {"input_ids": ids, "position_ids": ids, "document_ids": torch.zeros_like(ids), "labels": ids}
    module(batch)["lm_loss"].backward()
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in weights.values())
    other: Any = registry().component("architectures", "gpt2")(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UserError, match='"fp8" changes nothing in GPT2LMHeadModel'):
        distributed_fp8.convert(registry().component("objectives", "causal_lm")().build(other, VOCABULARY))
