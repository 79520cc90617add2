"""ZeRO checkpoints give the float32 weights that were partitioned; DeepSpeed's own merging agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published_layouts as layouts
import pytest
import torch

from terakoya.errors import UserError
from terakoya_plugins.formats.deepspeed import DeepSpeed, read_weights

FROZEN = ("model.layers.0.", "model.embed")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            (name, {"stage": stage, "processes": processes})
            for name in ("gpt2", "llama") for stage in (1, 2, 3) for processes in (1, 3)
        ),
        *(("llama", {"stage": stage, "processes": 2, "frozen": FROZEN}) for stage in (2, 3)),
        *(("llama", {"stage": stage, "processes": 3, "alignment": 7}) for stage in (1, 2)),
    ],
)  # fmt: skip
def test_every_stage_gives_the_models_logits(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = layouts.zero(layouts.model(name), tmp_path / "in", **options)
    DeepSpeed(config=source).read(source / "global_step7", tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model(name))


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


def test_the_error_of_a_missing_config_names_the_setting(tmp_path: Path) -> None:
    source = layouts.zero(layouts.model("llama"), tmp_path / "in", stage=3, processes=2)
    (source / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"expected a config\.json, found none; .*--config DIR"):
        DeepSpeed().read(source, tmp_path / "out")
    DeepSpeed(config=tmp_path).read(source, tmp_path / "out")
    layouts.same(tmp_path / "out", layouts.model("llama"))
