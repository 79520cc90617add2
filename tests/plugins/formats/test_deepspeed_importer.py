"""ZeRO checkpoints give the float32 weights that were partitioned; DeepSpeed's own merging agrees."""

from __future__ import annotations

import shutil
from pathlib import Path

import published_layouts as layouts
import pytest
import torch

from terakoya.errors import UserError
from terakoya_plugins.formats.deepspeed import DeepSpeed, read_weights


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_stage_gives_the_models_logits(name: str, stage: int, processes: int, tmp_path: Path) -> None:
    source = layouts.zero(layouts.model(name), tmp_path / "in", stage=stage, processes=processes)
    DeepSpeed().read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model(name))


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_imported(stage: int, tmp_path: Path) -> None:
    model = layouts.model("llama")
    source = layouts.zero(model, tmp_path / "in", stage=stage, processes=2, frozen=("model.layers.0.", "model.embed"))
    DeepSpeed(config=source).read(source / "global_step7", tmp_path / "out")
    layouts.same(tmp_path / "out", model)


@pytest.mark.parametrize("stage", [1, 2])
def test_padding_of_aligned_weights_is_removed(stage: int, tmp_path: Path) -> None:
    model = layouts.model("llama")
    source = layouts.zero(model, tmp_path / "in", stage=stage, processes=3, alignment=7)
    DeepSpeed().read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", model)


@pytest.mark.parametrize(("stage", "alignment"), [(2, None), (2, 7), (3, None)])
def test_deepspeeds_own_merging_gives_the_same_weights(stage: int, alignment: int | None, tmp_path: Path) -> None:
    zero_to_fp32 = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    source = layouts.zero(
        layouts.model("gpt2"), tmp_path / "in", stage=stage, processes=3, frozen=("transformer.wpe",),
        alignment=alignment,
    )  # fmt: skip
    theirs = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(source))
    ours = read_weights(source / "global_step7")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_missing_or_mismatched_partitions_are_errors(tmp_path: Path) -> None:
    source = layouts.zero(layouts.model("gpt2"), tmp_path / "in", stage=2, processes=3)
    folder = source / "global_step7"
    file = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(file, weights_only=False)
    file.unlink()
    with pytest.raises(UserError, match="expected the partitions of 3 ranks, found 2"):
        DeepSpeed().read(source, tmp_path / "out")
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][1] = torch.zeros(3)
    torch.save(content, file)
    with pytest.raises(UserError, match=r"ends after the [\d,]+ numbers of group 1"):
        DeepSpeed().read(source, tmp_path / "out")
    shutil.copy(file, folder / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with pytest.raises(UserError, match="tensor or pipeline parallelism"):
        DeepSpeed().read(source, tmp_path / "out")


def test_the_error_of_a_missing_config_names_the_setting(tmp_path: Path) -> None:
    source = layouts.zero(layouts.model("llama"), tmp_path / "in", stage=3, processes=2)
    (source / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"expected a config\.json, found none; .*--config DIR"):
        DeepSpeed().read(source, tmp_path / "out")
    DeepSpeed(config=tmp_path).read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model("llama"))
