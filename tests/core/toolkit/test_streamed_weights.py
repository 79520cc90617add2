"""Files of weights that are written one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from terakoya.toolkit.formats._streamed_weights import DTYPES, save, write_file


def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {f"{name}.{size}": torch.arange(size).to(dtype) for dtype, name in DTYPES.items() for size in (0, 3, 8)}
    tensors |= {'名前 "quoted"': torch.rand(2, 3, 4), "number": torch.tensor(1.5), "turned": torch.rand(4, 5).T}
    for metadata in ({"format": "pt"}, None):
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "whole", metadata)
        write_file(tensors, tmp_path / "streamed", metadata, lambda value: value)
        assert (tmp_path / "streamed").read_bytes() == (tmp_path / "whole").read_bytes()


def small() -> BertModel:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    return BertModel(BertConfig(**sizes))


def test_a_weight_that_is_asked_for_at_once_is_written_with_all_others(tmp_path: Path) -> None:
    model, asked = small(), []

    def value_of(weight: torch.Tensor) -> torch.Tensor:
        asked.append(weight)
        if len(asked) == 3:
            raise RuntimeError("not one at a time")
        return weight

    save(model, tmp_path, dict(model.state_dict()), value_of)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == model.state_dict().keys() and len(asked) > 3
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())


def test_a_weight_without_values_is_an_error_and_no_short_file(tmp_path: Path) -> None:
    model = small()
    state = {**model.state_dict(), "embeddings.LayerNorm.bias": torch.empty(8, device="meta")}
    with pytest.raises(ValueError, match=r"embeddings.LayerNorm.bias has no values"):
        save(model, tmp_path, state, lambda value: value)
