"""Padding that sees nothing gives NaN on some GPUs: here a kernel on the CPU does, and padded batches stay finite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface, AutoModel, ModernBertConfig, ModernBertForSequenceClassification
from transformers.masking_utils import sdpa_mask

from terakoya.errors import UserError
from terakoya.inference.loading import load_model_and_tokenizer
from terakoya.inference.padded_attention import mask_without_empty_rows, use_safe_attention

LONG, SHORT = 24, 5


@pytest.fixture
def careless_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that returns NaN for a position that sees nothing."""
    real = torch.nn.functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **further: Any) -> Tensor:
        output: Tensor = real(query, key, value, attn_mask=attn_mask, **further)
        return output if attn_mask is None else output.masked_fill(~attn_mask.any(-1, keepdim=True), torch.nan)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)


@pytest.fixture
def masks_of_transformers() -> Iterator[None]:
    """Nobody has replaced Transformers' masks or left out cuDNN before, nor has when the test is over."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    AttentionMaskInterface.register("sdpa", sdpa_mask)
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    AttentionMaskInterface.register("sdpa", sdpa_mask)
    torch.backends.cuda.enable_cudnn_sdp(before)


def loss_and_gradient() -> tuple[Tensor, Tensor]:
    """Those of two texts, the shorter of which is padded by far more than the window reaches."""
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, local_attention=4, classifier_pooling="mean", attn_implementation="sdpa",
        pad_token_id=0, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = ModernBertForSequenceClassification(config)
    ids = torch.randint(3, 50, (2, LONG))
    seen = torch.ones_like(ids)
    ids[1, SHORT:], seen[1, SHORT:] = 0, 0
    loss = model(input_ids=ids, attention_mask=seen, labels=torch.tensor([0, 1])).loss
    loss.backward()
    gradient = model.model.layers[0].attn.Wqkv.weight.grad
    assert gradient is not None
    return loss.detach(), gradient


@pytest.mark.usefixtures("masks_of_transformers")
def test_padding_that_sees_nothing_gives_no_nan(request: pytest.FixtureRequest) -> None:
    expected = loss_and_gradient()
    request.getfixturevalue("careless_kernel")
    assert loss_and_gradient()[0].isnan()  # Transformers alone

    use_safe_attention()
    loss, gradient = loss_and_gradient()
    torch.testing.assert_close((loss, gradient), expected)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("masks_of_transformers")
def test_what_needs_no_mask_gets_none() -> None:
    use_safe_attention()
    mask = AttentionMaskInterface()["sdpa"]
    assert mask(batch_size=1, q_length=4, kv_length=4, allow_is_causal_skip=True) is None
    causal = mask(batch_size=1, q_length=4, kv_length=4, allow_is_causal_skip=False)
    assert torch.equal(causal[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.usefixtures("masks_of_transformers")
def test_every_model_that_is_loaded_attends_safely(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError):
        load_model_and_tokenizer(AutoModel, tmp_path)
    assert AttentionMaskInterface()["sdpa"] is mask_without_empty_rows
