"""Files of weights that are written one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from terakoya.toolkit.formats.streamed_weights import DTYPES, write_file


def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {f"{name}.{size}": torch.arange(size).to(dtype) for dtype, name in DTYPES.items() for size in (0, 3, 8)}
    tensors |= {'名前 "quoted"': torch.rand(2, 3, 4), "number": torch.tensor(1.5), "turned": torch.rand(4, 5).T}
    for metadata in ({"format": "pt"}, None):
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "whole", metadata)
        write_file(tensors, tmp_path / "streamed", metadata, lambda value: value)
        assert (tmp_path / "streamed").read_bytes() == (tmp_path / "whole").read_bytes()
