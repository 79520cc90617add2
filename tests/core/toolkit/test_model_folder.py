"""Writing a Transformers folder."""

import os
import sys

import pytest

from terakoya.toolkit.formats.model_folder import silence_logging


def test_silence_leaves_no_variable_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that saved a model may start others, which choose for themselves."""
    pytest.importorskip("deepspeed")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delitem(sys.modules, "deepspeed")
    silence_logging()
    assert "DS_ACCELERATOR" not in os.environ
