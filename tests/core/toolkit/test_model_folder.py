"""Writing a Transformers folder, and a file of torch."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch

from terakoya.toolkit.formats.model_folder import silence_logging, write_torch_file


def test_silence_leaves_no_variable_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that saved a model may start others, which choose for themselves."""
    pytest.importorskip("deepspeed")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delitem(sys.modules, "deepspeed")
    silence_logging()
    assert "DS_ACCELERATOR" not in os.environ


def test_a_torch_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    """`torch.save` alone raises a RuntimeError, which names neither file nor reason."""
    content = {"weight": torch.arange(300_000)}
    write_torch_file(content, tmp_path / "weights.pt")
    assert torch.equal(torch.load(tmp_path / "weights.pt")["weight"], content["weight"])
    with pytest.raises(OSError, match="No space left") as caught:
        write_torch_file(content, Path("/dev/full"))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == "/dev/full"
