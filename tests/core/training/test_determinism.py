"""Deterministic algorithms: what is switched, and what a refused operation says."""

import os
from collections.abc import Iterator

import pytest
import torch

from terakoya.errors import UserError
from terakoya.training import determinism


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(determinism.CUBLAS_WORKSPACE, raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("wanted", [True, False])
def test_algorithms_are_chosen_for_the_whole_process(wanted: bool) -> None:
    determinism.choose(wanted)
    assert torch.are_deterministic_algorithms_enabled() is wanted
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # flash attention would only warn
    assert torch.utils.deterministic.fill_uninitialized_memory is False


def test_cublas_gets_the_workspace_that_is_deterministic_unless_the_user_gave_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    determinism.choose(False)
    assert determinism.CUBLAS_WORKSPACE not in os.environ
    determinism.choose(True)
    assert os.environ[determinism.CUBLAS_WORKSPACE] == ":4096:8"
    monkeypatch.setenv(determinism.CUBLAS_WORKSPACE, ":16:8")
    determinism.choose(True)
    assert os.environ[determinism.CUBLAS_WORKSPACE] == ":16:8"


def test_an_operation_without_such_an_algorithm_is_named_with_the_setting_that_allows_it() -> None:
    determinism.choose(True)
    refused = pytest.raises(UserError, match=r'on a GPU put_ has no algorithm .* "deterministic": false')
    with refused, determinism.explain_refusals():
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))
    with pytest.raises(RuntimeError, match="another"), determinism.explain_refusals():
        raise RuntimeError("another error")
