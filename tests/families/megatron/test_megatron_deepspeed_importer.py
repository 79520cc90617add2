"""Imported layer files of Megatron-DeepSpeed give, in plain Transformers, the logits of the original model."""

from __future__ import annotations

from pathlib import Path

import megatron_layouts
import published_layouts as layouts
import pytest
import torch

from terakoya.errors import UserError
from terakoya_megatron.deepspeed_importer import MegatronDeepSpeed


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2", "gpt2, untied", "llama"])
def test_any_tensor_size_gives_the_models_logits(name: str, tp: int, tmp_path: Path) -> None:
    source = megatron_layouts.megatron_deepspeed(layouts.model(name), tmp_path / "in", tp=tp)
    MegatronDeepSpeed(vocab_size=150).read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model(name))


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_version_decides_the_order_of_queries_keys_and_values(version: float, tp: int, tmp_path: Path) -> None:
    source = megatron_layouts.megatron_deepspeed(layouts.model("gpt2"), tmp_path / "in", tp=tp, version=version)
    MegatronDeepSpeed(vocab_size=150).read(source / "global_step1000", tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model("gpt2"))


def test_a_missing_version_is_an_error(tmp_path: Path) -> None:
    source = megatron_layouts.megatron_deepspeed(layouts.model("gpt2"), tmp_path / "in", tp=2, version=0)
    file = source / "global_step1000/mp_rank_00_model_states.pt"
    torch.save({key: value for key, value in torch.load(file, weights_only=False).items() if key == "args"}, file)
    with pytest.raises(UserError, match="has no checkpoint_version"):
        MegatronDeepSpeed(vocab_size=150).read(source, tmp_path / "out")
    MegatronDeepSpeed(vocab_size=150, checkpoint_version=0).read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model("gpt2"))


def test_unsupported_models_are_errors_that_name_the_cause(tmp_path: Path) -> None:
    source = megatron_layouts.megatron_deepspeed(layouts.model("gpt2"), tmp_path / "a", tp=2, num_experts=[8])
    with pytest.raises(UserError, match=r"num_experts is \[8\]: a mixture of experts"):
        MegatronDeepSpeed(vocab_size=150).read(source, tmp_path / "out")
    source = megatron_layouts.megatron_deepspeed(
        layouts.model("gpt2"), tmp_path / "b", tp=2, position_embedding_type="alibi"
    )
    with pytest.raises(UserError, match="'alibi': this kind of positions"):
        MegatronDeepSpeed(vocab_size=150).read(source, tmp_path / "out")
    source = megatron_layouts.megatron_deepspeed(layouts.model("gpt2"), tmp_path / "c", tp=2)
    file = source / "global_step1000/layer_04-model_01-model_states.pt"
    content = torch.load(file)
    torch.save({**content, "mlp.deepspeed_moe.gate.wg.weight": torch.zeros(2)}, file)
    torch.save(
        {**content, "mlp.deepspeed_moe.gate.wg.weight": torch.zeros(2)}, str(file).replace("model_01", "model_00")
    )
    with pytest.raises(UserError, match=r"deepspeed_moe\.gate\.wg\.weight: unknown weight; a mixture of experts"):
        MegatronDeepSpeed(vocab_size=150).read(source, tmp_path / "out")
    file.unlink()
    with pytest.raises(UserError, match="the file of tensor-parallel rank 1 is missing"):
        MegatronDeepSpeed(vocab_size=150).read(source, tmp_path / "out")
    with pytest.raises(UserError, match="--no-pipeline-parallel writes none"):
        MegatronDeepSpeed().read(tmp_path, tmp_path / "out")


def test_a_norm_that_differs_between_ranks_is_named(tmp_path: Path) -> None:
    source = megatron_layouts.megatron_deepspeed(layouts.model("gpt2"), tmp_path / "in", tp=2)
    file = source / "global_step1000/layer_05-model_01-model_states.pt"
    content = torch.load(file)
    content["input_layernorm.bias"] += 1
    torch.save(content, file)
    with pytest.raises(UserError, match=r"input_layernorm\.bias should be the same in all files"):
        MegatronDeepSpeed(vocab_size=150).read(source, tmp_path / "out")
