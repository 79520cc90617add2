"""A micro-step of the preset that is fully sharded, on a GPU without data: the bf16 stream beside autocast."""

import json
from pathlib import Path
from typing import Any

import fake_cuda
import fake_cuda_cases
import pytest

WORKER = Path(fake_cuda.__file__).with_name("fake_cuda_shards.py")


@pytest.mark.slow
def test_the_stream_moves_less_and_starts_fewer_kernels_under_fsdp(tmp_path: Path) -> None:
    raw: dict[str, Any] = json.loads((fake_cuda_cases.PRESETS / "llama_8b.json").read_text())
    raw["architecture"]["num_hidden_layers"] = 2
    raw |= {"data": {"train": ["store"], "sequence_length": 2048}, "evaluation": None, "trackers": []}
    raw["precision"] = "bf16"
    cases = {"stream": raw, "autocast": {**raw, "autocast": True}}
    seen = json.loads(fake_cuda_cases.run([str(WORKER)], json.dumps(cases), fake_cuda.compile_guard(tmp_path)))
    assert all(each.pop("waits") == [] for each in seen.values())
    found = {name: (each["kernels"], round(each["bytes"] / 1e9, 1)) for name, each in seen.items()}
    assert found["stream"][0] <= 0.6 * found["autocast"][0] and found["stream"][1] <= 0.75 * found["autocast"][1]
    page = (Path(__file__).parents[3] / "docs" / "design" / "bf16-stream.md").read_text().split()
    (kernels, size), (under, more) = found["stream"], found["autocast"]
    text = f"a micro-step of two of its blocks is {size} GB in {kernels} kernels, under autocast {more} GB in {under}"
    assert fake_cuda_cases.torch_version() != "2.13" or text in " ".join(page), text
