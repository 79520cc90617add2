"""Sequence and context parallelism: each process's part of a batch, and of attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, BertConfig, BertModel

from terakoya.errors import UserError
from terakoya.toolkit.architectures import attention
from terakoya_parallel.sequence_parallel import UlyssesExchange, slice_positions


def test_slices_together_are_the_batch() -> None:
    rows, length, processes = 2, 12, 3
    ids = torch.arange(rows * length).view(rows, length)
    labels = torch.tensor([100, 111, 112, 123, -100])
    places = torch.tensor([0, 11, 12, 17, 0])  # the last slot is unused
    batch = {
        "input_ids": ids, "document_ids": ids // 5, "masked_positions": places, "masked_labels": labels,
        "whole_rows": torch.empty(0), "cu_seqlens": torch.arange(rows * length + 1),
    }  # fmt: skip
    size = length // processes
    slices = [slice_positions(batch, place * size, size) for place in range(processes)]
    assert torch.equal(torch.cat([each["input_ids"] for each in slices], dim=1), ids)
    found = {}
    for each in slices:
        assert torch.equal(each["document_ids"], batch["document_ids"]) and each["cu_seqlens"] is batch["cu_seqlens"]
        used = each["masked_labels"] != -100
        at = each["input_ids"].flatten()[each["masked_positions"]]
        found |= dict(zip(at[used].tolist(), each["masked_labels"][used].tolist(), strict=True))
    assert found == {0: 100, 11: 111, 12: 112, 17: 123}


@pytest.mark.parametrize(
    ("heads", "processes", "shared"),
    [(2, 2, [0, 1]), (1, 2, [0, 0]), (2, 4, [0, 0, 1, 1]), (2, 3, [0, 0, 0, 1, 1, 1]), (4, 2, [0, 1, 2, 3])],
)
def test_fewer_key_heads_than_processes_are_repeated(
    heads: int, processes: int, shared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process gets the key heads of its own query heads; repeated heads stay neighbours."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: processes)
    exchange = UlyssesExchange(None)  # type: ignore[arg-type]
    monkeypatch.setattr(exchange, "_gather", lambda states: states)
    monkeypatch.setattr(exchange, "_scatter", lambda states: states)
    query, key = torch.zeros(1, 12, 1, 1), torch.arange(heads).view(1, heads, 1, 1)
    got = exchange(lambda query, key, value: torch.cat([key, value]), query, key, key)
    assert got[0].flatten().tolist() == got[1].flatten().tolist() == shared


def test_heads_that_cannot_be_divided_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for architectures whose name for the setting is unknown to the check of the parameters."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 4)
    states = torch.zeros(1, 6, 2, 2)
    with pytest.raises(UserError, match=r"parallel.sp_size 4: 6 attention heads cannot be shared evenly"):
        UlyssesExchange(None)(lambda *_: states, states, states, states)  # type: ignore[arg-type]


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1], [0, 1, 1, 1, 1, 1, 2, 2]])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", attention.BACKENDS)
def test_an_exchange_reaches_every_backend(backend: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange receives the backend's arguments, and attention returns its result."""
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8))
    attention.use(model, backend)
    arrays = attention.boundary_arrays(DOCUMENTS.numpy())
    batch: dict[str, Any] = {"document_ids": DOCUMENTS, **{name: torch.from_numpy(arrays[name]) for name in arrays}}
    query, key, value = (torch.randn(2, heads, 8, 4, generator=torch.manual_seed(1)) for heads in (4, 2, 2))

    def varlen(query: Tensor, *_: Any, **__: Any) -> Tensor:
        return query  # there is no GPU here: any result will do

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)

    def exchange(attend: attention.Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        halves = [attend(query[:, 2 * n : 2 * n + 2], key[:, n : n + 1], value[:, n : n + 1]) for n in range(2)]
        return -torch.cat(halves, dim=2)

    said = (attention.causal_arguments if causal else attention.arguments)(
        model, {**batch, attention.EXCHANGE: exchange}
    )
    plain = (attention.causal_arguments if causal else attention.arguments)(model, batch)
    function = AttentionInterface()[attention.PREFIX + backend]
    got, _ = function(torch.nn.Identity(), query, key, value, None, **said)
    wanted, _ = function(torch.nn.Identity(), query, key, value, None, **plain)
    assert torch.allclose(got, -wanted, atol=1e-6)
    assert attention.EXCHANGE not in plain
    whole_rows = {**batch, attention.WHOLE_ROWS: torch.empty(0), attention.EXCHANGE: exchange}
    assert attention.causal_arguments(model, whole_rows)[attention.EXCHANGE] is exchange


def varlen_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch's variable-length kernel says that it computes: a sequence's last query is at its last key."""
    made, (left, right) = torch.zeros_like(query), window_size
    for first, stop, key_first, key_stop in zip(
        starts[:-1].tolist(), starts[1:].tolist(), key_starts[:-1].tolist(), key_starts[1:].tolist(), strict=True
    ):
        count, seen = stop - first, key_stop - key_first
        assert count <= longest and seen <= longest_key
        if not count:
            continue
        distance = (torch.arange(count) + seen - count)[:, None] - torch.arange(seen)
        mask = ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
        parts = (query[first:stop], key[key_first:key_stop], value[key_first:key_stop])
        states = (part.transpose(0, 1)[None] for part in parts)
        made[first:stop] = F.scaled_dot_product_attention(*states, mask, enable_gqa=enable_gqa)[0].transpose(0, 1)
    return made


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", attention.BACKENDS)
def test_queries_of_a_slice_see_their_documents_in_all_slices(
    backend: str, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slices of two positions; every backend against sdpa in whole rows."""
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_reference)
    monkeypatch.setattr(varlen_reference, "__kwdefaults__", {"enable_gqa": False})
    query, key, value = (torch.randn(2, heads, 8, 4, generator=torch.manual_seed(1)) for heads in (4, 2, 2))
    boundaries = {name: torch.from_numpy(each) for name, each in attention.boundary_arrays(DOCUMENTS.numpy()).items()}
    batch: dict[str, Any] = {"document_ids": DOCUMENTS, **boundaries}
    said = attention.causal_arguments if causal else attention.arguments

    def attend(backend: str, batch: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention.use(model, backend)
        function = AttentionInterface()[attention.PREFIX + backend]
        return function(torch.nn.Identity(), query, key, value, None, sliding_window=window, **said(model, batch))[0]

    whole = attend("sdpa", batch, query, key, value)
    if backend == "flash" and window is not None and not causal:
        with pytest.raises(UserError, match=r"flash with parallel.cp_size has no local attention to both sides"):
            attend(backend, {**batch, attention.QUERIES: slice(0, 2)}, query[:, :, :2], key, value)
        return
    for first in range(0, 8, 2):
        own = slice(first, first + 2)

        def exchange(attend: attention.Attend, query: Tensor, *of_the_slice: Tensor) -> Tensor:
            return attend(query, key, value)

        part = {**batch, attention.QUERIES: own, attention.EXCHANGE: exchange}
        got = attend(backend, part, *(states[:, :, own] for states in (query, key, value)))
        assert torch.allclose(got, whole[:, own], atol=1e-6), first
