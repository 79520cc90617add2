"""Causal attention on every backend, compared with the formula: documents, shared heads, windows, whole rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from slow_varlen import slow_varlen
from torch import Tensor
from transformers import AttentionInterface, GPT2Config, GPT2Model

from terakoya.toolkit.architectures import _document_attention, attention

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])
ROWS, LENGTH, HEADS, SIZE = 2, 12, 4, 8


def states(key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(ROWS, heads, LENGTH, SIZE) for heads in (HEADS, key_heads, key_heads)]
    query, key, value = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return query, key, value


def expected(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, window: int | None, scale: float) -> Tensor:
    """The result (B, T, N, D), computed position by position and head by head."""
    result = torch.zeros(ROWS, LENGTH, HEADS, SIZE, dtype=torch.float64)
    shared = HEADS // key.shape[1]
    for row, head, place in np.ndindex(ROWS, HEADS, LENGTH):
        seen = [
            other
            for other in range(place + 1)
            if documents[row, other] == documents[row, place] and (window is None or place - other < window)
        ]
        scores = query[row, head, place] @ key[row, head // shared, seen].T * scale
        result[row, place, head] = scores.softmax(-1) @ value[row, head // shared, seen]
    return result


def arguments(backend: str, documents: Tensor, **further: Tensor) -> dict[str, Any]:
    """The arguments of the layers of a model with that backend."""
    model: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention.PREFIX + backend))
    batch = {"document_ids": documents, **further}
    if backend == "flash":
        arrays = attention.boundary_arrays(documents.numpy())
        batch |= {name: torch.from_numpy(array) for name, array in arrays.items()}
    return attention.causal_arguments(model, batch)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("backend", attention.BACKENDS)
def test_a_position_sees_its_document_up_to_itself(
    backend: str, key_heads: int, window: int | None, scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_varlen)
    query, key, value = states(key_heads)
    function = AttentionInterface()[attention.PREFIX + backend]
    module = torch.nn.Identity()
    real = DOCUMENTS >= 0
    scale = SIZE**-0.5 if scaling is None else scaling
    given = {"scaling": scaling, "sliding_window": window}
    got, _ = function(module, query, key, value, None, **given, **arguments(backend, DOCUMENTS))
    wanted = expected(query, key, value, DOCUMENTS, window, scale)
    tolerance = 1e-6 if backend == "eager" else 1e-12  # eager's softmax is in float32
    assert (got - wanted)[real].abs().max() < tolerance and torch.isfinite(got).all()

    one = torch.where(DOCUMENTS >= 0, 0, -1)  # each row one document, padding behind
    said = arguments(backend, one, **{attention.WHOLE_ROWS: torch.empty(0)})
    got, _ = function(module, query, key, value, None, **given, **said)
    wanted = expected(query, key, value, one, window, scale)
    assert (got - wanted)[real].abs().max() < tolerance and torch.isfinite(got).all()
    assert "document_mask" not in said


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_flash_fits_the_kernel_of_torch_2_11(key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function has no `enable_gqa`, and takes fewer heads of keys all the same."""

    def varlen(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        assert return_aux is None and scale is None
        grouped = query.shape[1] != key.shape[1]
        return slow_varlen(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size, enable_gqa=grouped
        )

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    query, key, value = states(key_heads)
    given = arguments("flash", DOCUMENTS)
    got, _ = AttentionInterface()["terakoya_flash"](torch.nn.Identity(), query, key, value, None, **given)
    real = DOCUMENTS >= 0
    wanted = expected(query, key, value, DOCUMENTS, None, SIZE**-0.5)
    assert (got - wanted)[real].abs().max() < 1e-12


def test_whole_rows_have_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """sdpa gets `is_causal`, which allows its fastest implementation."""
    seen: list[dict[str, Any]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any, **named: Any) -> Tensor:
        seen.append({"mask": mask, **named})
        return plain(query, key, value, mask, *rest, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    query, key, value = states(2)
    attend = AttentionInterface()["terakoya_sdpa"]
    attend(torch.nn.Identity(), query, key, value, None, causal=True)
    attend(torch.nn.Identity(), query, key, value, None, document_mask=attention.causal_mask(DOCUMENTS))
    assert seen[0]["mask"] is None and seen[0]["is_causal"]
    assert seen[1]["mask"] is not None and not seen[1]["is_causal"]


def test_dropout_of_causal_models_is_found() -> None:
    config = GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2, n_positions=8, attn_pdrop=0.25)
    assert attention.dropout(GPT2Model(config)) == 0.25


def test_a_released_model_without_sdpa_attends_as_in_transformers() -> None:
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, rotary_dim=4)
    model = GPTJForCausalLM(config).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        attention.use(model, "sdpa")
        attention.release(model)
        assert torch.equal(model(input_ids=ids).logits, before)
        changed = torch.cat([ids[:, :6], ids[:, 6:] + 1], dim=1)
        assert torch.equal(model(input_ids=changed).logits[:, :6], before[:, :6])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_document_by_document_equals_the_mask(key_heads: int, window: int | None) -> None:
    """Gradients are equal, too; a GPU uses the mask."""
    attend = AttentionInterface()["terakoya_sdpa"]
    real = DOCUMENTS >= 0
    wanted: list[Tensor] = []
    for given in ({"document_mask": attention.causal_mask(DOCUMENTS)}, arguments("sdpa", DOCUMENTS)):
        leaves = [each.requires_grad_() for each in states(key_heads)]
        got, _ = attend(torch.nn.Identity(), *leaves, None, sliding_window=window, **given)
        found = [got[real].detach(), *torch.autograd.grad(got[real].square().sum(), leaves)]
        assert "document_mask" in given or given["document_lengths"] == [5, 4, 3, 12]
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, wanted or found, strict=True))
        wanted = found


def test_rows_whose_neighbouring_documents_have_the_same_number_are_not_joined() -> None:
    document_ids = torch.tensor([[0, 0, 1], [1, 1, -1], [-1, -1, -1], [0, 0, 0]])
    assert _document_attention.lengths(document_ids) == [2, 1, 2, 1, 3, 3]
