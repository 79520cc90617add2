"""A tiny model that several test files fine-tune."""

from pathlib import Path

import pytest
from labelled_examples import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny masked model, as it is exported."""
    return make_model(tmp_path_factory.mktemp("finetune") / "model")
