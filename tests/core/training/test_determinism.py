"""Deterministic algorithms: what is switched and restored, and what a refused operation says."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as compiler

from terakoya.checking import model_errors
from terakoya.errors import UserError
from terakoya.training.model import determinism


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with determinism.restore_choice():
        yield


def chosen() -> tuple[bool, bool, bool, bool]:
    filling: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return enabled, warns, filling, compiler.deterministic


def test_algorithms_are_chosen_for_the_process_until_a_run_ends() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = chosen()
    assert before == (True, True, True, True)
    with determinism.restore_choice():
        determinism.choose(True)
        assert chosen() == (True, False, False, True)  # in the mode that warns flash attention stays as it is
        determinism.choose(False)
        assert chosen() == (False, False, False, False)
    assert chosen() == before


def test_importing_the_package_tells_cublas_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import os, terakoya; print(os.environ[{determinism.CUBLAS_WORKSPACE!r}])"
    rest = {key: value for key, value in os.environ.items() if key != determinism.CUBLAS_WORKSPACE}
    for given, expected in ({}, ":4096:8"), ({determinism.CUBLAS_WORKSPACE: ":16:8"}, ":16:8"):
        done = subprocess.run([sys.executable, "-c", program], env={**rest, **given}, capture_output=True, check=True)
        assert done.stdout.decode().strip() == expected
    monkeypatch.setenv(determinism.CUBLAS_WORKSPACE, ":0:0")
    determinism.choose(False)
    with pytest.raises(UserError, match=r'CUBLAS_WORKSPACE_CONFIG is ":0:0": expected one of :4096:8, :16:8'):
        determinism.choose(True)


def test_an_operation_without_such_an_algorithm_is_named_with_the_setting_that_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for check in ("check_model", "check_memory"):
        monkeypatch.setattr(model_errors, check, lambda *given, **named: None)
    given: Any = None, None, SimpleNamespace(world_size=1)
    determinism.choose(True)
    refused = pytest.raises(UserError, match=r'on a GPU put_ has no algorithm .* "deterministic": false')
    with refused, model_errors.explain_model_errors(*given):  # what is open in a run's first steps
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))
    too_late = pytest.raises(UserError, match="multiplied on the GPU before it imported terakoya")
    with too_late, determinism.explain_refusals():
        raise RuntimeError("it uses CuBLAS ...: CUBLAS_WORKSPACE_CONFIG=:4096:8")
    with pytest.raises(RuntimeError, match="another"), determinism.explain_refusals():
        raise RuntimeError("another error")
