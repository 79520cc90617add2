"""Toy stores that tests of training, estimation and commands use."""

from pathlib import Path

import pytest
import toy


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy store of 150 documents."""
    return toy.make_store(tmp_path_factory.mktemp("toy") / "train", documents=150, seed=1)


@pytest.fixture(scope="session")
def validation_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy store of 30 other documents."""
    return toy.make_store(tmp_path_factory.mktemp("toy") / "validation", documents=30, seed=2)


@pytest.fixture(scope="session")
def line_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy store of 60 documents cut into lines."""
    return toy.make_store(tmp_path_factory.mktemp("toy") / "lines", documents=60, seed=3, unit="line")
