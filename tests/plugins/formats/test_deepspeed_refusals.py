"""Invalid ZeRO checkpoints are errors that name the problem; unusual ones are read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published_layouts as layouts
import pytest
import torch

from terakoya.errors import UserError
from terakoya_plugins.formats.deepspeed import DeepSpeed, find_step_folder, read_weights

OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = {2: "mp_rank_00_model_states.pt", 3: "zero_pp_rank_0_mp_rank_00_model_states.pt"}


def write_checkpoint(folder: Path, stage: int = 2, **settings: Any) -> Path:
    """Writes a checkpoint of a small model; returns the folder of its step."""
    source = layouts.zero(layouts.model("gpt2"), folder, stage=stage, processes=settings.pop("processes", 2))
    return source / "global_step7"


def rewrite(file: Path, change: Callable[[Any], Any]) -> None:
    """Replaces the content of `file` by what `change` returns for it."""
    content = torch.load(file, weights_only=False)
    torch.save(change(content), file)


def set_in_optimizer(step: Path, **values: Any) -> None:
    """Sets `values` in the first partition."""
    rewrite(
        step / OPTIMIZER.format(0),
        lambda content: {**content, "optimizer_state_dict": {**content["optimizer_state_dict"], **values}},
    )


@pytest.mark.parametrize(("stage", "key"), [(2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")])
def test_partitions_of_another_length_are_errors(stage: int, key: str, tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, stage)
    groups = torch.load(step / OPTIMIZER.format(0), weights_only=False)["optimizer_state_dict"][key]
    longer = [torch.cat([groups[0], torch.zeros(50)]), *groups[1:]]
    set_in_optimizer(step, **{key: longer})
    expected = r"group 0 has [\d,]+ numbers, its weights take" if stage == 2 else r"slices of the weights take [\d,]+"
    with pytest.raises(UserError, match=expected):
        read_weights(step)
    set_in_optimizer(step, **{key: [group[:-40] for group in groups]})
    with pytest.raises(UserError, match="ends after the"):
        read_weights(step)
    if stage == 2:
        set_in_optimizer(step, **{key: groups[:1]})
        with pytest.raises(UserError, match="expected 2 groups of weights in every partition"):
            read_weights(step)


def test_missing_content_is_named(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path / "stage")
    set_in_optimizer(step, zero_stage=4)
    with pytest.raises(UserError, match="expected ZeRO stage 1, 2 or 3, got 4"):
        read_weights(step)
    set_in_optimizer(step, zero_stage=2, partition_count=3)
    with pytest.raises(UserError, match="expected the partitions of 3 ranks, found 2"):
        read_weights(step)
    other = step / OPTIMIZER.format(0).replace("mp_rank_00", "mp_rank_01")
    other.write_bytes((step / OPTIMIZER.format(0)).read_bytes())
    with pytest.raises(UserError, match="tensor or pipeline parallelism"):
        read_weights(step)
    other.unlink()
    set_in_optimizer(step, partition_count=2)
    rewrite(step / MODEL[2], lambda content: {key: content[key] for key in content if key != "param_shapes"})
    with pytest.raises(UserError, match="has no param_shapes; was it written by DeepSpeed before"):
        read_weights(step)
    rewrite(step / MODEL[2], lambda content: {})
    with pytest.raises(UserError, match="has no module"):
        read_weights(step)
    stage_3 = write_checkpoint(tmp_path / "stage_3", stage=3)
    (stage_3 / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(UserError, match="a file is missing"):
        read_weights(stage_3)


def test_folders_without_a_checkpoint_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        find_step_folder(tmp_path / "nowhere")
    (tmp_path / "latest").write_text("global_step9\n")
    with pytest.raises(UserError, match="global_step9: no such folder"):
        find_step_folder(tmp_path)
    (tmp_path / "global_step9").mkdir()
    with pytest.raises(UserError, match="expected files mp_rank_00_model_states"):
        find_step_folder(tmp_path)


def test_a_config_without_a_known_class_is_an_error(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for names in (["NoSuchModel"], None):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": names}))
        with pytest.raises(UserError, match="architectures: expected a class of Transformers"):
            DeepSpeed().read(step, tmp_path / "out")


def test_without_the_optimizers_partitions_the_models_weights_are_imported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = write_checkpoint(tmp_path)
    for rank in range(2):
        (step / OPTIMIZER.format(rank)).unlink()
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        found = read_weights(step)
    state = layouts.model("gpt2").state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(value, state[name].bfloat16()) for name, value in found.items())
    assert "no partitions of an optimizer" in caplog.text and "bfloat16" in caplog.text


def test_buffers_are_imported_and_names_lose_the_wrappers_prefix(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path)
    table = torch.arange(3.0)

    def wrap_names(content: Any) -> Any:
        shapes = [{f"module.{name}": shape for name, shape in names.items()} for names in content["param_shapes"]]
        shared = {f"module.{name}": f"module.{other}" for name, other in content["shared_params"].items()}
        return {
            **content, "param_shapes": shapes, "shared_params": shared, "buffer_names": ["module.table", "not saved"],
            "module": {**content["module"], "module.table": table},
        }  # fmt: skip

    rewrite(step / MODEL[2], wrap_names)
    assert torch.equal(read_weights(step)["module.table"], table)
    rewrite(step / MODEL[2], lambda content: {**content, "buffer_names": []})
    DeepSpeed().read(step, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model("gpt2"))


@pytest.mark.parametrize("prefix", ["", "fp16_"])
def test_partitions_are_ordered_by_rank(prefix: str, tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, processes=11)  # rank 10 comes after rank 2
    for rank in range(11):
        name = OPTIMIZER.format(rank)
        (step / name).rename(step / name.replace("bf16_", prefix))
    DeepSpeed().read(step, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model("gpt2"))
