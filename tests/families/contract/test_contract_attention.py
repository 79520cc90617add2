"""A model whose attention is more than a softmax of scores: Gemma 2's soft cap is computed, and would be missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AttentionInterface

import terakoya_contract as contract
from terakoya.plugins import loading as plugins
from terakoya.toolkit.architectures import attention

GEMMA2 = '''
from typing import ClassVar

from terakoya import hookimpl
from terakoya.toolkit.architectures.decoder import GatedDecoderArchitecture


class Gemma2(GatedDecoderArchitecture):
    """Gemma 2: attention scores and logits have soft caps."""

    config_class = "Gemma2Config"
    model_classes: ClassVar = {"causal": "Gemma2ForCausalLM"}
    test_settings: ClassVar = {"query_pre_attn_scalar": 4, "head_dim": 4}

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    """Keys and values."""
    head_dim: int = 256
    """Width of a head."""
    query_pre_attn_scalar: int = 256
    """Scores are divided by its root."""
    max_position_embeddings: int = 8192
    sliding_window: int = 6
    """Tokens that a layer with a window sees."""
    attn_logit_softcapping: float | None = 50.0
    """The soft cap of scores."""
    final_logit_softcapping: float = 30.0
    """The soft cap of logits."""

    def logits(self, model, hidden):
        """Returns logits within the soft cap."""
        return (model.lm_head(hidden) / self.final_logit_softcapping).tanh() * self.final_logit_softcapping


@hookimpl
def register_architectures():
    return {"gemma2": Gemma2}
'''


@pytest.fixture
def gemma2(fresh_plugins: None, tmp_path: Path) -> plugins.Registration:
    (tmp_path / "gemma2.py").write_text(GEMMA2, encoding="utf-8")
    (offer,) = (each for each in plugins.load([str(tmp_path / "gemma2.py")]).components() if each.name == "gemma2")
    return offer


def failed(offer: plugins.Registration) -> list[str]:
    return [str(result) for result in contract.check_component(offer, train=False) if result.status == "failed"]


def test_a_model_with_a_soft_cap_passes_every_check(gemma2: plugins.Registration) -> None:
    assert failed(gemma2) == []


def test_a_soft_cap_that_is_not_computed_fails(gemma2: plugins.Registration, monkeypatch: pytest.MonkeyPatch) -> None:
    """With new weights scores are so small that the cap changes nothing: the check takes larger ones."""
    name = attention.PREFIX + "sdpa"
    computed = AttentionInterface()[name]

    def ignoring(*states: Any, softcap: float, **further: Any) -> Any:
        return computed(*states, **further)

    monkeypatch.setitem(AttentionInterface._global_mapping, name, ignoring)
    *_, message = failed(gemma2)  # a model in the middle of a run is compared with Transformers' attention, too
    assert "Gemma2ForCausalLM returns other numbers" in message
    assert "were multiplied by 30" in message


def test_an_argument_that_attention_does_not_know_is_named(
    gemma2: plugins.Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = attention.PREFIX + "sdpa"
    computed = AttentionInterface()[name]

    def further_argument(*states: Any, **further: Any) -> Any:
        return computed(*states, temperature=2.0, **further)

    monkeypatch.setitem(AttentionInterface._global_mapping, name, further_argument)
    (message,) = failed(gemma2)
    assert "model_type gemma2: Gemma2Attention passes temperature to its attention" in message
