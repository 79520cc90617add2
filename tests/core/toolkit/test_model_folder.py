"""Writing a Transformers folder, and a file of torch."""

import errno
import os
import resource
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


def test_a_write_that_fails_in_the_middle_of_a_torch_file_names_its_reason(tmp_path: Path) -> None:
    """torch closes its archive after such a write, fails again, and reports that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # bytes of one file
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_torch_file({"weight": torch.arange(300_000)}, tmp_path / "weights.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(tmp_path / "weights.pt")
