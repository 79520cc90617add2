"""A whole model saved by SageMaker's library gives the logits of the original GPT-J."""

from __future__ import annotations

from pathlib import Path

import megatron_layouts
import published_layouts as layouts
import pytest
import torch

from terakoya.errors import UserError
from terakoya_megatron.smdistributed import SmDistributed


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Weights of the small GPT-J, under the library's names."""
    return megatron_layouts.smdistributed(megatron_layouts.gptj())


def test_a_full_model_with_its_config_gives_the_models_logits(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = megatron_layouts.gptj()
    torch.save(weights, tmp_path / "fullmodel.pt")
    notes = {"model_config": model.config, "cli_args": {"num_heads": 99}, "num_params": 1, "total_steps": 500}
    torch.save(notes, tmp_path / "user_content_fullmodel.pt")  # the config is an object of Transformers
    SmDistributed().read(tmp_path, tmp_path / "out")
    layouts.same(tmp_path / "out", model)


def test_settings_replace_a_missing_config(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({"model": weights}, tmp_path / "fullmodel.pt")
    with pytest.raises(UserError, match="set num_attention_heads, max_position_embeddings, rotary_dim"):
        SmDistributed().read(tmp_path, tmp_path / "out")
    given = SmDistributed(num_attention_heads=4, max_position_embeddings=40, rotary_dim=4)
    given.read(tmp_path / "fullmodel.pt", tmp_path / "out")
    layouts.same(tmp_path / "out", megatron_layouts.gptj())


def test_a_model_with_names_of_transformers_loses_only_its_masks(tmp_path: Path) -> None:
    model = megatron_layouts.gptj()
    own = dict(model.state_dict())
    own["transformer.h.0.attn.bias"] = torch.ones(1, 1, 40, 40, dtype=torch.uint8)
    own["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e9)
    torch.save(own, tmp_path / "full_final.pt")
    SmDistributed(num_attention_heads=4, max_position_embeddings=40, rotary_dim=4).read(tmp_path, tmp_path / "out")
    layouts.same(tmp_path / "out", model)


def test_unknown_or_partial_models_are_errors(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    given = SmDistributed(num_attention_heads=4, max_position_embeddings=40, rotary_dim=4)
    (tmp_path / "total_steps500_partial").mkdir()
    with pytest.raises(UserError, match="found 0; the folder has parts of a model"):
        given.read(tmp_path, tmp_path / "out")
    file = tmp_path / "fullmodel.pt"
    torch.save({**weights, "transformer.seq_layers.0.crossattention.query.weight": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"unknown weights: transformer\.seq_layers\.0\.crossattention\.query\.weight"):
        given.read(tmp_path, tmp_path / "out")
    torch.save({name: value for name, value in weights.items() if name != "lm_head.bias"}, file)
    with pytest.raises(UserError, match=r"lacks lm_head\.bias"):
        given.read(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="unpack it first"):
        given.read(tmp_path / "model.tar.gz", tmp_path / "out")
