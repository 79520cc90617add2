"""Attributes, environment variables and levels of logs that are others for a while."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest

from terakoya.toolkit.attributes import replace_attribute, replace_level, replace_variables


def test_an_attribute_has_its_value_again_also_after_an_error() -> None:
    owner = SimpleNamespace(name=1)
    with replace_attribute(owner, "name", 2):
        assert owner.name == 2
    assert owner.name == 1
    with pytest.raises(RuntimeError), replace_attribute(owner, "name", 3):
        assert owner.name == 3
        raise RuntimeError
    assert owner.name == 1


def test_variables_have_their_values_again_or_are_unset_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAKOYA_TEST_SET", "before")
    monkeypatch.delenv("TERAKOYA_TEST_UNSET", raising=False)
    names = ("TERAKOYA_TEST_SET", "TERAKOYA_TEST_UNSET")
    with pytest.raises(RuntimeError), replace_variables(dict.fromkeys(names, "while open")):
        assert [os.environ[name] for name in names] == ["while open"] * 2
        raise RuntimeError
    assert [os.environ.get(name) for name in names] == ["before", None]


def test_a_logger_has_its_level_again() -> None:
    logger = logging.getLogger("terakoya.tests.level")
    logger.setLevel(logging.INFO)
    with pytest.raises(RuntimeError), replace_level(logger.name, logging.ERROR):
        assert logger.level == logging.ERROR
        raise RuntimeError
    assert logger.level == logging.INFO
