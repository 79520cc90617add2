"""Attention that keeps the documents of one row apart, registered once with Transformers' AttentionInterface.

Encoders see their whole document (`arguments`), causal models what stands before in it (`causal_arguments`).

Every model that calls its attention through the interface gets it: no mask function is registered under these names,
so Transformers hands over no mask of its own, and what `arguments` returns travels through the model's keyword
arguments to each layer.

Letters in shapes: B rows, T positions, N heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from terakoya.errors import UserError
from terakoya.toolkit.architectures import attention_backends, document_attention

PREFIX = "terakoya_"
BACKENDS = ("sdpa", "eager", "flash")
WHOLE_ROWS = "whole_rows"
"""The name in a batch, of an empty tensor, that says: each row is one document with padding behind it."""
EXCHANGE = "exchange"
"""The name in a batch of the `Exchange` with which processes that share the positions of rows attend in whole ones. The
arrays (B, t) of such a batch hold a slice of the positions each; `document_ids` (B, T) is whole."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention in whole rows: query, key and value (B, N, T, D) to (B, T, N, D)."""
Exchange = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]
"""Attention in slices of rows, of whichever is given for whole ones: that, and query, key and value (B, N, t, D), to
(B, t, N, D)."""


def document_mask(document_ids: Tensor, seen: Tensor | None = None) -> Tensor:
    """Which position may look at which, (B, 1, T, T) bool, from `document_ids` (B, T), -1 for padding; with the ids
    `seen` (B, S) of other positions, as a decoder sees an encoder's, (B, 1, T, S).

    Padding looks at padding, so that no row of the softmax is empty; nothing that counts looks at it.
    """
    seen = document_ids if seen is None else seen
    return (document_ids[:, None, :, None] == seen[:, None, None, :]).contiguous()


def causal_mask(document_ids: Tensor) -> Tensor:
    """`document_mask` (B, 1, T, T) without all that comes later."""
    return document_mask(document_ids).tril()


def boundaries(document_ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Cumulative document lengths over the flattened rows, for variable-length kernels.

    Args:
        document_ids: (B, T), equal neighbours belong together, -1 for padding (a document of its own in each row).

    Returns:
        `cu_seqlens` (B * T + 1,) int32: starts of documents, then the total repeated, so that the shape never depends
        on the data; and the upper bound T of a document's length.
    """
    rows, length = document_ids.shape
    starts = np.ones((rows, length), dtype=bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    found = np.flatnonzero(starts.ravel())
    cu_seqlens = np.full(rows * length + 1, rows * length, dtype=np.int32)
    cu_seqlens[: len(found)] = found
    return cu_seqlens, length


def arguments(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a model's forward is called with so that each of its layers keeps documents apart.

    `batch` holds `document_ids` (B, T); for the flash backend also `cu_seqlens` from `boundaries`.
    """
    if model.config._attn_implementation == PREFIX + "flash":
        length = batch["document_ids"].shape[1]
        return {"cu_seqlens": batch["cu_seqlens"], "max_document_length": length, **_exchange(batch)}
    return {"document_mask": document_mask(batch["document_ids"]), **_exchange(batch)}


def causal_arguments(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """`arguments` for a causal model: each position sees its own document up to itself.

    Where `batch` has WHOLE_ROWS, each row is one document with padding behind it: no mask is made. Nor is one for sdpa
    on a CPU, which takes one document after another.
    """
    backend, document_ids = model.config._attn_implementation, batch["document_ids"]
    if backend == PREFIX + "flash":
        return {**arguments(model, batch), "causal": True}
    if WHOLE_ROWS in batch:
        return {"causal": True, **_exchange(batch)}
    if backend == PREFIX + "sdpa" and document_ids.device.type == "cpu":
        return {"causal": True, "document_lengths": document_attention.lengths(document_ids), **_exchange(batch)}
    return {"document_mask": causal_mask(document_ids), **_exchange(batch)}


def _exchange(batch: Mapping[str, Any]) -> dict[str, Exchange]:
    """The batch's exchange, where processes share positions, for each layer."""
    return {EXCHANGE: batch[EXCHANGE]} if EXCHANGE in batch else {}


def additive(allowed: Tensor) -> Tensor:
    """What models that add a mask to their scores are handed: float32, 0 where `allowed`, else hardly above -inf.

    The number is bfloat16's lowest, so that under autocast too a row of nothing allowed is no row of NaN; under that of
    float16 half of its lowest, so that scores can be added.
    """
    nothing, kind = torch.zeros((), device=allowed.device), allowed.device.type
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    least = torch.finfo(torch.float16).min / 2 if half else torch.finfo(torch.bfloat16).min
    return torch.where(allowed, nothing, nothing + least)


def _over_processes(attend: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Any]:
    """`attend`, called by the `exchange` where processes share positions: with whole rows, of a part of the heads."""

    @wraps(attend)
    def attend_or_exchange(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        exchange: Exchange | None = None,
        **further: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if exchange is None:
            return attend(module, query, key, value, attention_mask, **further)

        def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(module, query, key, value, attention_mask, **further)[0]

        return exchange(whole, query, key, value), None

    return attend_or_exchange


for _name in BACKENDS:
    AttentionInterface.register(PREFIX + _name, _over_processes(getattr(attention_backends, _name)))


def choose(
    requested: str,
    *,
    device: torch.device,
    precision: str,
    dropout: float,
    document_masking: str = "attention_interface",
) -> str:
    """The backend for `"attention": requested`: `auto` takes what is exact and has dropout.

    An architecture whose `document_masking` is not "attention_interface" masks in its own way, which flash cannot.

    Raises:
        UserError: the backend cannot do what the run asks of it.
    """
    if requested == "auto":
        fits = (
            device.type == "cuda"
            and precision != "fp32"
            and dropout == 0.0
            and document_masking == "attention_interface"
        )
        return "flash" if fits else "sdpa"
    if requested == "flash":
        if document_masking != "attention_interface":
            raise UserError(
                "attention: flash is for models that attend through Transformers' AttentionInterface, which this "
                'architecture does not; use "attention": "sdpa"'
            )
        if dropout:
            raise UserError(
                f"attention: flash has no dropout, but the architecture's attention has {dropout}; "
                'set it to 0.0 or use "attention": "sdpa"'
            )
        if device.type != "cuda" or precision == "fp32":
            raise UserError(
                f"attention: flash needs a GPU and bf16 or fp16, got {device.type} and {precision}; use "
                '"attention": "sdpa"'
            )
    return requested


def dropout(module: nn.Module) -> float:
    """The largest dropout of attention among the Transformers models inside `module`."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    names = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
    return max((float(getattr(model.config, name, 0.0)) for model in models for name in names), default=0.0)


def use(module: nn.Module, backend: str) -> None:
    """Sets `backend` ("sdpa", "eager" or "flash") on every Transformers model inside `module`."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = PREFIX + backend


def release(model: PreTrainedModel) -> None:
    """Gives `model` back Transformers' own attention, for saving and for use outside a run."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # a model without sdpa would be handed no mask at all where sdpa needs none
            part.config._attn_implementation = "sdpa" if part._supports_sdpa else "eager"
