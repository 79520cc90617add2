"""The check of `output_layers`: without them a block has no effect, or it fails."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from terakoya.plugins import registry
from terakoya_contract import architecture
from terakoya_contract.results import CheckFailed, CheckSkipped


def case(name: str, **changes: Any) -> architecture.ArchitectureCase:
    """The case of a bundled architecture, with other class attributes."""
    bundled = registry().component("architectures", name)
    fields = {"__annotations__": {key: ClassVar for key in changes}, "__module__": __name__}
    component = type("Changed", (bundled,), {**changes, **fields}) if changes else bundled
    return architecture.ArchitectureCase("architectures", name, component)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama", "qwen3", "modernbert", "t5"])
def test_bundled_architectures_pass(name: str) -> None:
    architecture.check_output_layers(case(name))


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("llama", ("o_proj",), "changes its hidden states by"),
        ("llama", ("out",), "no layer named out"),
        ("bert", ("dense",), "changes its hidden states by"),
    ],
)
def test_wrong_layers_fail(name: str, layers: tuple[str, ...], message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        architecture.check_output_layers(case(name, output_layers=layers))


def test_a_family_without_them_is_skipped() -> None:
    with pytest.raises(CheckSkipped):
        architecture.check_output_layers(case("bert"))
