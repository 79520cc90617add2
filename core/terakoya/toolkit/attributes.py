"""Attributes, environment variables and levels of logs that are others for a while."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
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


@contextmanager
def replace_variables(values: Mapping[str, str]) -> Iterator[None]:
    """While open, environment variables have `values`."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def replace_level(logger: str, level: int) -> Iterator[None]:
    """While open, the logger of this name has the `level`."""
    found = logging.getLogger(logger)
    before = found.level
    found.setLevel(level)
    try:
        yield
    finally:
        found.setLevel(before)
