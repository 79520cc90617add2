"""An attribute that has another value for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from terakoya.toolkit.attributes import replace_attribute


def test_an_attribute_has_its_value_again_also_after_an_error() -> None:
    owner = SimpleNamespace(name=1)
    with replace_attribute(owner, "name", 2):
        assert owner.name == 2
    assert owner.name == 1
    with pytest.raises(RuntimeError), replace_attribute(owner, "name", 3):
        assert owner.name == 3
        raise RuntimeError
    assert owner.name == 1
