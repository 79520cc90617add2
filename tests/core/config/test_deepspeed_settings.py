"""A user's DeepSpeed JSON: settings that agree with the parameters are passed on, conflicts are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terakoya.config import deepspeed as deepspeed_settings
from terakoya.config.parallel import Parallel
from terakoya.errors import UserError

OURS: dict[str, Any] = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 5},
    "steps_per_print": 7,
}


def problems(config: dict[str, Any], **changes: Any) -> list[str]:
    return list(
        deepspeed_settings.find_problems(
            config, **{"zero_stage": 2, "max_grad_norm": 1.0, "precision": "fp32", **changes}
        )
    )


def test_a_file_for_transformers_trainer_is_passed_on() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False, "loss_scale": 0},
        "optimizer": "auto",
        "zero_optimization": {
            "stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000, "allgather_bucket_size": "auto",
        },
        "wall_clock_breakdown": True,
        "steps_per_print": "auto",
    }  # fmt: skip
    assert not problems(config)
    merged = deepspeed_settings.merge_configs(config, OURS)
    assert merged["zero_optimization"] == {
        "stage": 2, "stage3_param_persistence_threshold": 5, "overlap_comm": True, "reduce_bucket_size": 1000,
    }  # fmt: skip
    assert merged["wall_clock_breakdown"] is True
    changed = {"zero_optimization", "wall_clock_breakdown"}
    assert {key: merged[key] for key in merged if key not in changed} == {
        key: OURS[key] for key in OURS if key not in changed
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping: 0.5, but max_grad_norm is 1.0"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: 3, but parallel.zero_stage is 2"),
        ({"bf16": {"enabled": True}}, 'bf16: is enabled, but precision is "fp32"; set "precision": "bf16"'),
        ({"optimizer": {"type": "AdamW"}}, 'optimizer: use the key "optimizer" of the parameters'),
        ({"scheduler": {"type": "WarmupLR"}}, 'scheduler: use the key "schedule"'),
        ({"communication_data_type": "fp16"}, "communication_data_type: expected 'fp32'"),
        ({"gradient_cliping": 1.0}, 'is not supported; did you mean "gradient_clipping"'),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights: changes the results"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param: needs zero_stage 3, got 2"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, '"nvme" is not supported; use "cpu"'),
    ],
)  # fmt: skip
def test_a_conflict_is_reported(config: dict[str, Any], expected: str) -> None:
    found = problems(config)
    assert len(found) == 1
    assert expected in found[0]
    assert found[0].startswith("parallel.deepspeed_config.")


@pytest.mark.parametrize("key", sorted(deepspeed_settings.BATCH))
def test_batch_sizes_must_equal_those_of_the_parameters(key: str) -> None:
    assert not problems({key: 5})
    with pytest.raises(UserError, match=rf"{key}: is 5, but batch_size and micro_batch_size give {OURS[key]}"):
        deepspeed_settings.merge_configs({key: 5}, OURS)


def test_the_precision_of_the_parameters_is_no_conflict() -> None:
    assert not problems({"bf16": {"enabled": True}}, precision="bf16")


def test_a_file_is_read_with_the_parameters(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"overlap_comm": True}}))
    given = {"engine": "deepspeed", "zero_stage": 1, "deepspeed_config": str(file)}
    assert Parallel.model_validate(given).deepspeed_config == {"zero_optimization": {"overlap_comm": True}}
    file.write_text("{")
    with pytest.raises(ValueError, match=r"ds\.json"):
        Parallel.model_validate(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"engine": "ddp", "deepspeed_config": {}}, 'deepspeed_config needs engine "deepspeed", got "ddp"'),
        ({"engine": "ddp", "offload_optimizer_device": "cpu"}, "offload_optimizer_device: needs zero_stage 1, 2 or 3"),
        (
            {"engine": "deepspeed", "zero_stage": 2, "offload_param_device": "cpu"},
            "offload_param_device: needs zero_stage 3, got 2",
        ),
    ],
)
def test_offloading_needs_a_stage(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Parallel.model_validate(given)
