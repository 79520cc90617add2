"""The coordinate check finds an architecture whose activations change more in a wide model than in a narrow one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from torch import nn

from terakoya.components import Architecture
from terakoya.plugins import registry
from terakoya.training.model import mup
from terakoya_contract.architecture import ArchitectureCase
from terakoya_contract.coordinates import check_coordinates
from terakoya_contract.results import CheckFailed, CheckSkipped
from terakoya_plugins.architectures.electra import Electra
from terakoya_plugins.architectures.gemma3_text import Gemma3Text
from terakoya_plugins.architectures.llama import Llama

FAMILIES = ("bert", "electra", "modernbert", "llama")


def check(component: type[Architecture]) -> None:
    check_coordinates(ArchitectureCase("architectures", component.__name__, component))


@pytest.mark.parametrize("name", FAMILIES)
def test_usual_initial_values_and_rates_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scales the logits of a model with four times the width change several times as much."""

    def unscaled(module: nn.Module, *others: Any) -> Mapping[str, mup.Scale]:
        return {key: mup.Scale(1.0, 1.0) for key, _ in module.named_parameters()}

    monkeypatch.setattr(mup, "compare", unscaled)
    with pytest.raises(CheckFailed, match=r"have changed \d+(\.\d+)? times as much at hidden_size"):
        check(registry().component("architectures", name))


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["initial", "rate"])
def test_initial_values_or_rates_alone_fail(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = mup.compare

    def half(module: nn.Module, wider: nn.Module, ratio: float, norms: Collection[nn.Module]) -> dict[str, mup.Scale]:
        found = compare(module, wider, ratio, norms)
        return {name: mup.Scale(**{**vars(each), left_out: 1.0}) for name, each in found.items()}

    monkeypatch.setattr(mup, "compare", half)
    with pytest.raises(CheckFailed):
        check(Llama)


def test_a_tied_head_needs_the_norm_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya_contract.coordinates.norm_before_tied_head", lambda model, blocks: None)
    with pytest.raises(CheckFailed, match="the logits have changed"):
        check(registry().component("architectures", "bert"))


def test_a_norm_with_a_number_of_its_own_fails() -> None:
    """Gemma's norms multiply by 1 + weight, so that a smaller weight makes nothing smaller."""

    class Claims(Gemma3Text):
        mup_widths = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")

    with pytest.raises(CheckFailed, match="multiply embeddings, logits or norms by a number of its own"):
        check(Claims)


def test_widths_are_names_of_fields() -> None:
    for wrong in (("hidden_size", "embedding_width"), ("embedding_size",)):
        with pytest.raises(CheckFailed, match="expected names of its fields, hidden_size among them"):
            check(type("Wrong", (Electra,), {"mup_widths": wrong}))
    with pytest.raises(CheckSkipped, match="the key mup is refused"):
        check(type("Without", (Electra,), {"mup_widths": ()}))
