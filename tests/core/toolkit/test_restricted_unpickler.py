"""Files of torch.save are read without running the code that they name."""

from __future__ import annotations

import argparse
import enum
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from terakoya.errors import UserError
from terakoya.toolkit.formats import restricted_unpickler


class Harmful:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.file),)


def test_code_in_a_file_is_named_and_never_run(tmp_path: Path) -> None:
    torch.save({"model": torch.ones(2), "args": Harmful(tmp_path / "made")}, tmp_path / "file.pt")
    with pytest.raises(UserError, match=r"contains (posix|nt)\.mkdir, which is not known to be harmless"):
        restricted_unpickler.load(tmp_path / "file.pt")
    assert not (tmp_path / "made").exists()


def test_code_in_the_older_format_is_not_run_either(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"args": Harmful(tmp_path / "made")}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="cannot be read as tensors and plain values"):
        restricted_unpickler.load(file)
    assert not (tmp_path / "made").exists()
    torch.save({"model": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    assert torch.equal(restricted_unpickler.load(file)["model"], torch.ones(2))


def test_objects_of_training_programs_become_stubs_with_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("megatron.core.enums")

    class ModelType(enum.Enum):
        """As Megatron keeps one in its arguments."""

        encoder_or_decoder = 1

    ModelType.__module__, ModelType.__qualname__ = module.__name__, "ModelType"
    module.ModelType = ModelType  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    given = argparse.Namespace(model_type=ModelType.encoder_or_decoder, params_dtype=torch.bfloat16, lr=1e-4)
    torch.save({"args": given, "rng": np.random.RandomState(3).get_state(), "w": torch.ones(2)}, tmp_path / "file.pt")
    for name in ("megatron", "megatron.core", module.__name__):
        monkeypatch.delitem(sys.modules, name)
    content = restricted_unpickler.load(tmp_path / "file.pt")
    assert content["args"].lr == 1e-4 and content["args"].params_dtype is torch.bfloat16
    assert isinstance(content["args"].model_type, restricted_unpickler.Stub)
    assert content["args"].model_type.qualified_name in ("megatron.core.enums.ModelType", "builtins.getattr")
    assert "megatron.core.enums" not in sys.modules
    assert torch.equal(content["w"], torch.ones(2))


def test_files_that_torch_did_not_write_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(b"PK nothing")
    with pytest.raises(UserError, match="cannot be read"):
        restricted_unpickler.load(tmp_path / "file.pt")
    (tmp_path / "file.pt").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        restricted_unpickler.load(tmp_path / "file.pt")
    with pytest.raises(UserError, match="no such file"):
        restricted_unpickler.load(tmp_path / "other.pt")
