"""An attribute that has another value for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While open, the attribute `name` of `owner` is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
