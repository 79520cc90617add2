"""Documents in one row are exact on every backend that runs on this machine."""

from typing import Any

import numpy as np
import pytest
import torch
from slow_varlen import slow_varlen
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    ElectraConfig,
    ElectraModel,
    ModernBertConfig,
    ModernBertModel,
)
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from terakoya.errors import UserError
from terakoya.toolkit.architectures import _attention_backends, attention
from terakoya.training.model import determinism

LENGTHS = [5, 9, 3]
SIZES = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
MODELS = {
    "bert": lambda: BertModel(BertConfig(**SIZES), add_pooling_layer=False),
    "electra": lambda: ElectraModel(ElectraConfig(embedding_size=16, **SIZES)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    ),
}


def packed(padding: int = 0) -> dict[str, torch.Tensor]:
    """Three documents in one row (1, T), followed by `padding` empty positions."""
    total = sum(LENGTHS)
    ids = torch.randint(5, 90, (1, total + padding), generator=torch.Generator().manual_seed(1))
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)] + [torch.full((padding,), -1)])[None]
    positions = torch.cat([torch.arange(n) for n in [*LENGTHS, padding]])[None]
    further = {name: torch.from_numpy(array) for name, array in attention.boundary_arrays(documents.numpy()).items()}
    return {"input_ids": ids, "document_ids": documents, "position_ids": positions, **further}


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("family", list(MODELS))
@pytest.mark.parametrize("padding", [0, 4])
def test_documents_in_one_row_are_computed_as_single_documents(
    family: str, backend: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_varlen)
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    batch = packed(padding)
    with torch.no_grad():
        pieces = batch["input_ids"][:, : sum(LENGTHS)].split(LENGTHS, dim=1)
        alone = torch.cat([model(piece).last_hidden_state for piece in pieces], dim=1)
        attention.use(model, backend)
        together = model(
            batch["input_ids"], position_ids=batch["position_ids"], **attention.arguments(model, batch)
        ).last_hidden_state[:, : sum(LENGTHS)]
    assert torch.isfinite(together).all()
    assert (together - alone).abs().max() < 2e-6


def test_under_autocast_flash_gets_all_states_in_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions make float32 of queries and keys, which the kernel does not take."""
    seen: list[torch.dtype] = []

    def varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        seen.extend(each.dtype for each in (query, key, value))
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    flash = AttentionInterface()[attention.PREFIX + "flash"]
    query, key, value = torch.zeros(1, 2, 17, 8), torch.zeros(1, 2, 17, 8), torch.zeros(1, 2, 17, 8).bfloat16()
    sizes = {name: packed()[name] for name in attention.DOCUMENT_SIZES}
    with torch.autocast("cpu", torch.bfloat16):
        attended, _ = flash(torch.nn.Identity(), query, key, value, None, **sizes)
    assert seen == [torch.bfloat16] * 3 and attended.shape == (1, 17, 2, 8)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_layer_of_local_attention_sees_the_same_positions_as_in_transformers(backend: str) -> None:
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    torch.manual_seed(0)
    model = ModernBertModel(ModernBertConfig(**SIZES, **ids, local_attention=4)).eval()
    batch = packed()
    with torch.no_grad():
        alone = torch.cat([model(piece).last_hidden_state for piece in batch["input_ids"].split(LENGTHS, dim=1)], dim=1)
        attention.use(model, backend)
        given = attention.arguments(model, batch)
        together = model(batch["input_ids"], position_ids=batch["position_ids"], **given).last_hidden_state
        model.layers[1].attn.sliding_window = None
        everywhere = model(batch["input_ids"], position_ids=batch["position_ids"], **given).last_hidden_state
    assert (together - alone).abs().max() < 2e-6
    assert (everywhere - alone).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("length", "window", "blocks"), [(128, 9, True), (512, 65, True), (512, 1, True), (80, 9, False)]
)
def test_local_attention_in_blocks_is_that_of_a_mask(
    length: int, window: int, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    fused = _attention_backends._attend_fused
    monkeypatch.setattr(
        _attention_backends,
        "_attend_fused",
        lambda *given, **kept: [computed.append(given[1].shape[2]), fused(*given, **kept)][1],
    )
    generator = torch.Generator().manual_seed(1)
    document_ids = (torch.rand(2, length, generator=generator) < 0.05).cumsum(1)
    document_ids[1, -40:] = -1
    states = torch.randn(3, 2, length, 4, 8, generator=generator, dtype=torch.float64).transpose(2, 3)
    change = torch.randn(2, length, 4, 8, generator=generator, dtype=torch.float64)
    mask = attention.document_mask(document_ids)
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()

    def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = (query @ key.mT / 8**0.5).masked_fill(~(mask & (distance < window)), float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2)

    def ours(*states: torch.Tensor) -> torch.Tensor:
        return _attention_backends.sdpa(torch.nn.Identity(), *states, None, document_mask=mask, sliding_window=window)[
            0
        ]

    found = []
    for attend in (ours, reference):
        given = states.clone().requires_grad_()
        attended = attend(*given)
        attended.backward(change)
        found.append((attended, given.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    assert (computed[0] <= length / 2) == blocks, "keys that each query is compared with"


@pytest.mark.parametrize("length", [64, 512])
def test_on_a_cpu_short_rows_attend_in_float32(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch would convert them again."""
    seen: list[tuple[torch.dtype, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query: torch.Tensor, *further: Any, **options: Any) -> torch.Tensor:
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return attend(query, *further, **options)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    states = torch.randn(3, 1, 2, length, 8, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            attended, _ = _attention_backends.sdpa(torch.nn.Identity(), *states, None, document_mask=mask)
        assert attended.dtype == torch.bfloat16
    whole = [(torch.bfloat16, False), (torch.bfloat16, True)]
    assert seen == ([(torch.float32, False)] * 2 if length == 64 else whole)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_mask_and_a_bias_from_the_model_are_added(backend: str) -> None:
    function = AttentionInterface()[attention.PREFIX + backend]
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 6, 8, generator=draw) for _ in range(3))
    bias = torch.randn(1, 4, 6, 6, generator=draw)
    allowed = torch.rand(2, 1, 6, 6, generator=draw) < 0.5
    allowed[1, 0, 2] = False  # padding may see nothing at all
    mask = attention.additive(allowed)
    given, _ = function(torch.nn.Identity(), query, key, value, mask, position_bias=bias, scaling=1.0)
    scores = (query @ key.transpose(2, 3) + bias).masked_fill(~allowed, float("-inf"))
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    seen = allowed.any(-1).squeeze(1)
    assert torch.isfinite(given).all() and (given[seen] - expected[seen]).abs().max() < 1e-5
    with pytest.raises(TypeError, match="document_mask"):
        function(torch.nn.Identity(), query, key, value, None)
    assert torch.isfinite(mask.to(torch.bfloat16)).all()


def test_a_decoder_sees_its_own_document_of_the_encoder() -> None:
    target, source = torch.tensor([[0, 1, 1, -1]]), torch.tensor([[0, 0, 1, -1, -1]])
    assert attention.document_mask(target, source)[0, 0].int().tolist() == [
        [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]
    ]  # fmt: skip


def test_boundaries_never_join_rows() -> None:
    documents = np.array([[0, 0, 1, -1], [1, 1, 2, 2]])
    cu_seqlens, longest = attention.boundaries(documents)
    assert cu_seqlens.tolist() == [0, 2, 3, 4, 6, 8, 8, 8, 8]
    assert cu_seqlens.dtype == np.int32 and longest == 2


@pytest.mark.parametrize(("lengths", "room", "longest"), [
    ([254] * 79, 128, 256), ([512] * 32, 64, 512), ([100, 300] + [7] * 190, 256, 512), ([1] * 64, 64, 1),
    ([1] * 65, 65, 1), ([2] * 65, 128, 2), ([1] * 65_535, 65_535, 1), ([2] * 40_000, 65_535, 2),
])  # fmt: skip
def test_boundaries_leave_room_for_few_documents_that_are_not_there(
    lengths: list[int], room: int, longest: int
) -> None:
    documents = np.repeat(np.arange(len(lengths)), lengths)[None]
    cu_seqlens, most = attention.boundaries(documents)
    assert cu_seqlens.shape == (room + 1,) and most == min(longest, documents.size)
    assert np.diff(cu_seqlens)[: len(lengths)].tolist() == lengths and set(cu_seqlens[len(lengths) :]) == {sum(lengths)}


@pytest.mark.parametrize(("documents", "room"), [(1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (65, 128)])
def test_deterministic_attention_has_room_for_the_documents_that_are_there(documents: int, room: int) -> None:
    """Its backward kernel gives a document fewer thread blocks, the more documents there is room for."""
    ids = np.repeat(np.arange(documents), 4)[None]
    assert len(attention.boundaries(ids)[0]) == min(max(room, 64), ids.size) + 1
    with determinism.restore_choice():
        determinism.choose(True)
        cu_seqlens, _ = attention.boundaries(ids)
    assert np.diff(cu_seqlens)[:documents].tolist() == [4] * documents and len(cu_seqlens) == room + 1


def test_auto_follows_the_measured_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(length: int, device: str = "cuda", dropout: float = 0.0) -> str:
        return attention.choose("auto", device=torch.device(device), length=length, precision="bf16", dropout=dropout)

    assert {length: taken(length) for length in (128, 512, 8192)} == {128: "flash", 512: "flash", 8192: "flash"}
    monkeypatch.setattr(attention, "FASTEST", {1024: "flash", 512: "sdpa"})
    assert [taken(length) for length in (128, 512, 513, 1024, 1025)] == ["sdpa", "sdpa", "flash", "flash", "flash"]
    assert taken(2048, device="cpu") == taken(2048, dropout=0.1) == "sdpa", "what flash cannot compute"


def test_more_documents_than_the_kernel_takes_are_refused() -> None:
    with pytest.raises(UserError, match="smaller micro_batch_size"):
        attention.boundaries(np.arange(65_536)[None])


def test_backends_that_do_not_support_the_run_are_refused() -> None:
    cpu = torch.device("cpu")
    assert attention.choose("auto", length=512, device=cpu, precision="bf16", dropout=0.0) == "sdpa"
    assert attention.choose("auto", length=512, device=torch.device("cuda"), precision="bf16", dropout=0.1) == "sdpa"
    assert attention.choose("auto", length=512, device=torch.device("cuda"), precision="bf16", dropout=0.0) == "flash"
    with pytest.raises(UserError, match=r"the attention has dropout 0\.1, which flash has not"):
        attention.choose("flash", length=512, device=torch.device("cuda"), precision="bf16", dropout=0.1)
    cuda = torch.device("cuda")
    assert (
        attention.choose("auto", length=512, device=cuda, precision="bf16", dropout=0.0, document_masking="mask_4d")
        == "sdpa"
    )
    with pytest.raises(UserError, match="the architecture masks or biases its scores itself"):
        attention.choose("flash", length=512, device=cuda, precision="bf16", dropout=0.0, document_masking="mask_4d")
    with pytest.raises(UserError, match="cannot compute this run: this run is on the cpu"):
        attention.choose("flash", length=512, device=cpu, precision="bf16", dropout=0.0)


def test_release_restores_transformers_own_attention() -> None:
    model = MODELS["bert"]()
    attention.use(model, "eager")
    assert model.config._attn_implementation == "terakoya_eager"
    attention.release(model)
    assert model.config._attn_implementation == "sdpa"
    assert "terakoya" not in model.config.to_json_string()


STATES = (torch.Size((2, 4, 7, 8)), torch.Size((2, 2, 7, 8)), torch.Size((2, 2, 7, 8)))
"""Shapes of query, key and value: 4 heads, 2 of which share keys and values."""


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_caps_and_sinks_are_those_of_transformers(backend: str, with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (4 * torch.randn(shape, generator=generator) for shape in STATES)
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 2
    module.sinks = torch.tensor([3.0, -1.0, 0.5, 8.0])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]])
    allowed = attention.causal_mask(documents)
    lowest = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    further = {"s_aux": module.sinks} if with_sinks else {"softcap": 5.0}
    theirs = gpt_oss.eager_attention_forward if with_sinks else gemma2.eager_attention_forward
    expected, _ = theirs(module, query, key, value, lowest, scaling=0.3, **further)
    ours = AttentionInterface()[attention.PREFIX + backend]
    arguments = [{"document_mask": allowed}]
    if backend == "sdpa":
        arguments.append({"causal": True, "document_lengths": [3, 4, 5, 2]})
    for each in arguments:
        attended, _ = ours(module, query, key, value, None, scaling=0.3, position_ids=None, **each, **further)
        plain, _ = ours(module, query, key, value, None, scaling=0.3, **each)
        real = documents >= 0
        assert (attended - expected)[real].abs().max() < 2e-6
        assert (plain - expected)[real].abs().max() > 0.1


def test_what_attention_does_not_compute_is_refused() -> None:
    query, key, value = (torch.zeros(shape) for shape in STATES)
    module = BertModel(BertConfig(**SIZES), add_pooling_layer=False).encoder.layer[0].attention.self

    def attend(backend: str, **further: object) -> None:
        AttentionInterface()[attention.PREFIX + backend](module, query, key, value, None, **further)

    attend("sdpa", causal=True, key_bias=None, output_attentions=False)
    for backend in attention.BACKENDS:
        with pytest.raises(UserError, match=f"model_type bert: BertSelfAttention passes key_bias.* which {backend}"):
            attend(backend, causal=True, key_bias=torch.zeros(7))
    with pytest.raises(UserError, match=r'passes softcap .* which flash .*"attention": "sdpa"'):
        attend("flash", causal=True, softcap=5.0)
    with pytest.raises(UserError, match=r"passes s_aux .* which sequence parallelism"):
        attend("sdpa", causal=True, s_aux=torch.zeros(4), exchange=lambda *_: None)


def test_flash_is_not_chosen_for_capped_scores_and_sinks() -> None:
    capped = BertModel(BertConfig(**SIZES, attn_logit_softcapping=5.0), add_pooling_layer=False)
    sinking = MODELS["bert"]()
    assert attention.plain_softmax(sinking)
    sinking.encoder.layer[0].attention.self.sinks = torch.nn.Parameter(torch.zeros(4))
    run: dict[str, Any] = {"device": torch.device("cuda"), "length": 512, "precision": "bf16", "dropout": 0.0}
    for model in (capped, sinking):
        assert attention.choose("auto", plain_softmax=attention.plain_softmax(model), **run) == "sdpa"
        with pytest.raises(UserError, match="soft cap"):
            attention.choose("flash", plain_softmax=attention.plain_softmax(model), **run)
