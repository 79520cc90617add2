"""Are the fused kernels of the bf16 stream right on this GPU, and faster than torch's own?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_times import time_of
from settings import Measurement, Settings
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from terakoya.training.model import determinism
from terakoya_precision.bf16_stream import WeightCopies
from terakoya_precision.fused import self_check

BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
TINY = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
VARIANTS = {"plain": False, "fused": True}


def fused(settings: Settings) -> Iterator[Measurement]:
    """The check of a run's start; then a block of BERT-base with and without the kernels, compiled and not: how far its
    gradients are from float32 without dropout, whether they are the same bits twice, and the time of both passes."""
    determinism.choose(deterministic=True)
    widths = [32] if settings.tiny else [768, 1024]
    reason = self_check.failure(settings.device, widths)
    yield {"what": "check", "right": reason is None, "reason" if settings.tiny else "error": reason or ""}
    for variant, is_fused in VARIANTS.items():
        if is_fused and reason is not None:
            continue
        for compiled in (False,) if settings.tiny else (False, True):
            exact, _ = block_and_states(settings, dropout=0.0, exact=True)
            block, states = block_and_states(settings, dropout=0.0, fused=is_fused, compiled=compiled)
            expected, got = gradients(exact, states.detach().float().requires_grad_()), gradients(block, states)
            block, states = block_and_states(settings, dropout=0.1, fused=is_fused, compiled=compiled)
            step = partial(gradients, block, states)
            yield {
                "what": "block", "variant": variant, "compiled": compiled,
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "gradient_error": float((got - expected).norm() / expected.norm()),
                "same_bits_twice": torch.equal(step(), step()),
                "milliseconds": 1000 * time_of(step, settings.device),
            }  # fmt: skip


def block_and_states(
    settings: Settings, *, dropout: float, fused: bool = False, compiled: bool = False, exact: bool = False
) -> tuple[nn.Module, Tensor]:
    """Returns a block of the bf16 stream, or an `exact` one in float32, always of the same weights, and hidden states:
    32 rows of 512."""
    torch.manual_seed(1)
    sizes = TINY if settings.tiny else BASE
    configuration = BertConfig(
        vocab_size=8, num_hidden_layers=1, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0, **sizes
    )
    block = BertModel(configuration).encoder.layer[0].to(settings.device).train()
    block.attention.self.config._attn_implementation = "sdpa"
    rows = (2, 8) if settings.tiny else (32, 512)
    states = torch.randn(*rows, configuration.hidden_size, device=settings.device).bfloat16().requires_grad_()
    if not exact:
        WeightCopies(block, fused=fused)
        if compiled:
            block.compile(fullgraph=True, dynamic=False)
    return block, states


def gradients(block: nn.Module, states: Tensor) -> Tensor:
    """Returns the gradients of all weights of `block` in float32, after the same dropout and for the same gradient of
    its result."""
    torch.manual_seed(2)
    block.zero_grad()
    with torch.autocast(states.device.type, torch.bfloat16, enabled=states.dtype == torch.bfloat16):
        result = block(states)
    result.backward(torch.randn(result.shape, device=states.device).bfloat16().to(result.dtype))
    return torch.cat([each.grad.flatten() for each in block.parameters() if each.grad is not None])
