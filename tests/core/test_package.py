"""The package's own functions."""

import inspect

import pytest

import terakoya


@pytest.mark.parametrize("name", ["train_tokenizer", "prepare", "train", "export", "fill_mask", "find_replaced"])
def test_what_the_command_line_does_is_a_function(name: str) -> None:
    function = getattr(terakoya, name)
    assert inspect.isfunction(function) and function.__name__ == name and function.__doc__


def test_anything_else_is_missing() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        terakoya.trian  # noqa: B018
