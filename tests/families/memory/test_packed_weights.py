"""Frozen weights of 8 and 4 bits under adapters train, resume and export the model of the rounded weights, which numpy
rounds here."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from start_folders import spread
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from terakoya.config.parameters import Parameters
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.training.setup import train_in_this_process
from terakoya_planning.estimate import estimate

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")

LLAMA = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
IDS = {"vocab_size": 200, "bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""The values of `nf4`, from appendix E of the paper."""


def is_packed(name: str) -> bool:
    return any(f".{each}." in name for each in LINEAR)


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    values = weight.double().numpy()
    if kind == "int8":
        scales = np.abs(values).max(1, keepdims=True) / 127
        return torch.from_numpy(np.round(values / scales) * scales).float()
    blocks = values.reshape(-1, 64)
    scales = np.abs(blocks).max(1, keepdims=True)
    nearest = np.abs((blocks / scales)[..., None] - NF4).argmin(-1)
    return torch.from_numpy((NF4[nearest] * scales).reshape(values.shape)).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("llama")
    spread(LlamaForCausalLM(LlamaConfig(**LLAMA, **IDS, tie_word_embeddings=False)), 1).save_pretrained(folder)
    return folder


def settings(store: Path, folder: Path, kind: str | None, **changes: Any) -> dict[str, Any]:
    adapters = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "quantization": kind}
    return toy.parameters(
        store, start_from=str(folder), lora=adapters, max_steps=3, checkpoint={"save_steps": 1},
        optimizer={"type": "adamw", "learning_rate": 0.05}, objective={"type": "causal_lm", "append_eos": False},
        architecture={"type": "llama", **LLAMA, "tie_word_embeddings": False}, **changes,
    )  # fmt: skip


def trained(raw: dict[str, Any], out: Path) -> Path:
    train_in_this_process(Parameters.from_dict(raw, source="test"), out)
    return out


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_model_of_the_rounded_weights_is_trained_resumed_and_exported(
    store: Path, folder: Path, tmp_path: Path, kind: str
) -> None:
    values, up = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"  # without an adapter
    changed = {name: rounded(value, kind) if is_packed(name) else value for name, value in values.items()}
    assert (changed[up] - values[up]).abs().max() > 0.001
    shutil.copytree(folder, tmp_path / "rounded")
    save_file(changed, tmp_path / "rounded/model.safetensors", metadata={"format": "pt"})
    reference = trained(settings(store, tmp_path / "rounded", None), tmp_path / "reference")
    mine = trained(settings(store, folder, kind), tmp_path / "run")
    for step, values_there in toy.losses(reference).items():
        assert toy.losses(mine)[step] == pytest.approx(values_there, rel=1e-6)

    last = mine / "checkpoints/step-00000003"
    with safe_open(last / "state/model-00000.safetensors", "pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118
    shutil.copytree(mine / "checkpoints/step-00000002", tmp_path / "resumed/checkpoints/step-00000002")
    resumed = trained(settings(store, folder, kind), tmp_path / "resumed")
    for part in ("model", "optimizer"):
        first, second = (toy.saved(each / "checkpoints/step-00000003", part) for each in (mine, resumed))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    merged, expected = (export(each, tmp_path / f"{each.name}-model").out for each in (mine, reference))
    ids = torch.randint(6, 200, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(each)(ids).logits for each in (merged, expected)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    own = load_file(merged / "model.safetensors")
    assert all(torch.equal(value, load_file(last / "model/model.safetensors")[name]) for name, value in own.items())
    half = export(mine, tmp_path / "half", settings={"dtype": "bfloat16"}).out
    rounded_again = load_file(half / "model.safetensors")
    assert all(torch.equal(value, own[name].bfloat16()) for name, value in rounded_again.items())
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16
    torch.testing.assert_close(own[up], changed[up], rtol=1e-6, atol=1e-7)


def test_estimate_counts_packed_bytes(store: Path, folder: Path) -> None:
    plain = Parameters.from_dict(settings(store, folder, None), source="plain")
    packed = [value for name, value in load_file(folder / "model.safetensors").items() if is_packed(name)]
    linear, rows = sum(value.numel() for value in packed), sum(map(len, packed))
    before = estimate(plain)
    for kind, size in (("int8", linear + 4 * rows), ("nf4", linear // 2 + 4 * linear // 64)):
        after = estimate(Parameters.from_dict(settings(store, folder, kind), source=kind))
        assert before.memory.parts["weights"] - after.memory.parts["weights"] == 4 * linear - size
        assert after.sizes.parameters == before.sizes.parameters and after.sizes.trained == before.sizes.trained
        assert after.flops_per_step == before.flops_per_step and after.checkpoint == before.checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    import bitsandbytes  # here: it takes two seconds, in every process that collects this test

    from terakoya_memory.packed_weights import PackedLinear

    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 48)
    theirs = bitsandbytes.nn.Linear4bit(128, 48, quant_type="nf4", compress_statistics=False, compute_dtype=dtype)
    theirs.load_state_dict(layer.state_dict())
    states = torch.randn(7, 128, dtype=dtype, requires_grad=True)
    mine = PackedLinear(layer, "nf4")
    found = []
    for each in (mine, theirs.to("cpu")):
        states.grad = None
        result = each(states)
        result.float().square().sum().backward()
        found += [result, states.grad]
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[3])


def test_layers_of_gpt2_are_packed_by_outputs() -> None:
    from terakoya_memory.packed_weights import PackedLinear

    layer, linear = Conv1D(48, 128), torch.nn.Linear(128, 48)
    linear.load_state_dict({"weight": layer.weight.T, "bias": layer.bias})
    states = torch.randn(7, 128)
    mine = PackedLinear(layer, "int8")
    torch.testing.assert_close(mine(states), PackedLinear(linear, "int8")(states))
    torch.testing.assert_close(mine.weight, layer.weight.detach(), rtol=0, atol=0.001)


def test_what_cannot_be_packed_is_refused(store: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=r"lora\.quantization: packed weights are not divided.*got \"fsdp"):
        Parameters.from_dict(settings(store, folder, "nf4", parallel={"engine": "fsdp"}), source="p")
