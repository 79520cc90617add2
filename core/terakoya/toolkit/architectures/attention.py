"""Attention that keeps the documents of one row apart, registered once with Transformers' AttentionInterface.

In encoders a position sees its whole document (`arguments`), in causal models the part up to itself
(`causal_arguments`).

This works for every model that calls its attention through the interface. No mask function is registered under these
names, so Transformers passes no mask of its own, and the model passes the result of `arguments` to each layer in its
keyword arguments.

Letters in shapes: B rows, T positions, N heads, D size of a head.

See docs/design/attention.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from terakoya.components.flops import mean_context
from terakoya.errors import UserError
from terakoya.toolkit.architectures import _attention_backends, _document_attention
from terakoya.toolkit.fast_products import describe_processor, multiplies_fast

PREFIX = "terakoya_"
BACKENDS = ("sdpa", "eager", "flash")
MASKED = "masked_sdpa"
"""sdpa with a mask on every device, also where sdpa computes one document after another: shapes do not depend on
documents."""
WHOLE_ROWS = "whole_rows"
"""The name of an empty tensor in a batch. It means that each row is one document, followed by padding."""
LONGEST_DOCUMENT = "longest_document"
"""The name of a tensor (L, 0) in a batch: no document is longer than L."""
DOCUMENT_SIZES = frozenset({"cu_seqlens", LONGEST_DOCUMENT})
"""The tensors of a batch whose first size depends on its documents."""
FEWEST_DOCUMENTS = 64
"""For how many documents `boundaries` has room at least: batches with fewer share one shape. Deterministic algorithms
have exact room: by its source, the backward kernel then divides a head of a document among as many thread blocks as are
left when each document that there is room for has one."""
FASTEST: Mapping[int, Literal["flash", "sdpa"]] = {}
"""The faster backend for rows of at most so many tokens, as it was measured where both compute a run; rows that are
longer than all of these take flash, which does no work outside of documents."""
MOST_DOCUMENTS = 65_535
"""How many documents the flash kernel takes: the second size of a CUDA grid."""
LARGEST_HEAD = 256
"""How many channels of a head the flash kernel takes."""
EXCHANGE = "exchange"
"""The name of the `Exchange` in a batch, with which processes that share the positions of rows attend in whole rows.
The arrays (B, t) of such a batch hold a slice of the positions; `document_ids` (B, T) is whole."""
QUERIES = "queries"
"""The name of this slice in a batch whose exchange gathers keys and values, and leaves queries where they are."""
DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
"""The names that configs of Transformers have for the dropout of attention."""

WITHOUT_EFFECT = frozenset(
    {
        "is_causal",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "deterministic",
    }
)
"""Keyword arguments of Transformers' layers that change nothing here: `arguments` says who sees whom."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention in whole rows: query, key and value (B, N, T, D) to (B, T, N, D); where the batch has `QUERIES`, a query
(B, N, t, D) to (B, t, N, D)."""
Exchange = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]
"""Attention in slices of rows: takes an `Attend` for whole rows, and query, key and value (B, N, t, D); returns
(B, t, N, D)."""


def document_mask(document_ids: Tensor, seen: Tensor | None = None) -> Tensor:
    """Returns which position may attend to which, (B, 1, T, T) bool, from `document_ids` (B, T), -1 for padding. With
    the ids `seen` (B, S) of other positions, as for a decoder that attends to an encoder, (B, 1, T, S).

    Padding attends to padding, so that no row of the softmax is empty; no real position attends to padding.
    """
    seen = document_ids if seen is None else seen
    return (document_ids[:, None, :, None] == seen[:, None, None, :]).contiguous()


def causal_mask(document_ids: Tensor) -> Tensor:
    """Returns `document_mask` (B, 1, T, T) without later positions."""
    return document_mask(document_ids).tril()


def boundaries(document_ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns cumulative document lengths over the flattened rows `document_ids` (B, T), of which equal neighbours are
    one document, and -1 is padding, one document in each row. They are for variable-length kernels: `cu_seqlens` (N +
    1,) int32, the starts of documents, then the total repeated; and L, an upper bound of a document's length. N is that
    of `room_for`; L is a power of two, but at most T. Raises UserError for more than `MOST_DOCUMENTS` documents.

    The kernel takes time and memory for each document that the shape leaves room for, so there is room for little more
    than the documents that are there. Both numbers are rounded up to powers of two: a run meets a few shapes only.
    """
    rows, length = document_ids.shape
    starts = np.ones((rows, length), dtype=bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    found = np.flatnonzero(starts.ravel())
    if len(found) > MOST_DOCUMENTS:
        raise UserError(
            f"flash attention takes {MOST_DOCUMENTS:,} documents at once, and a micro-batch of {rows:,} rows has "
            f"{len(found):,}; give a smaller micro_batch_size"
        )
    room = room_for(len(found), rows * length)
    cu_seqlens = np.full(room + 1, rows * length, dtype=np.int32)
    cu_seqlens[: len(found)] = found
    longest = int(np.diff(found, append=rows * length).max())
    return cu_seqlens, min(_round_up(longest), length)


def room_for(documents: int, positions: int) -> int:
    """Returns how many documents `boundaries` has room for, where `documents` are in so many `positions`: a power of
    two, `FEWEST_DOCUMENTS` at least unless algorithms are deterministic, but at most `positions` and
    `MOST_DOCUMENTS`."""
    fewest = 1 if torch.are_deterministic_algorithms_enabled() else FEWEST_DOCUMENTS
    return min(max(_round_up(documents), fewest), MOST_DOCUMENTS, positions)


def _round_up(number: int) -> int:
    """Returns the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def boundary_arrays(document_ids: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays that the flash backend needs in a batch with `document_ids` (B, T): those of `boundaries`,
    the longest document as the first size of an array without elements, which every process reads without waiting."""
    cu_seqlens, longest = boundaries(document_ids)
    return {"cu_seqlens": cu_seqlens, LONGEST_DOCUMENT: np.empty((longest, 0), dtype=np.int32)}


def arguments(model: PreTrainedModel, batch: Mapping[str, Any], *, causal: bool = False) -> dict[str, Any]:
    """Returns the keyword arguments of a model's forward with which each of its layers keeps documents apart: for flash
    the boundaries of documents, for others a mask. `batch` holds `document_ids` (B, T); for flash also
    `boundary_arrays`. Where `causal`, a position sees no later one; `causal_arguments` may do without a mask."""
    document_ids, queries = batch["document_ids"], batch.get(QUERIES)
    if model.config._attn_implementation == PREFIX + "flash":
        said = {name: batch[name] for name in DOCUMENT_SIZES} | ({"causal": True} if causal else {})
        if queries is not None:
            said |= query_boundaries(said["cu_seqlens"], document_ids.shape, queries, causal=causal)
        return {**said, **_exchange(batch)}
    if queries is None:
        return {"document_mask": (causal_mask if causal else document_mask)(document_ids), **_exchange(batch)}
    mask = document_mask(document_ids[:, queries], document_ids)
    return {
        "document_mask": mask.tril(queries.start) if causal else mask, "first_query": queries.start, **_exchange(batch)
    }  # fmt: skip


def causal_arguments(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns `arguments` for a causal model: each position sees its own document up to itself.

    No mask is needed where `batch` has WHOLE_ROWS, nor for sdpa on a CPU, which computes one document after another.
    """
    backend, document_ids = model.config._attn_implementation, batch["document_ids"]
    if backend != PREFIX + "flash" and QUERIES not in batch:
        if WHOLE_ROWS in batch:
            return {"causal": True, **_exchange(batch)}
        if backend == PREFIX + "sdpa" and document_ids.device.type == "cpu":
            return {"causal": True, "document_lengths": _document_attention.lengths(document_ids), **_exchange(batch)}
    return arguments(model, batch, causal=True)


def query_boundaries(cu_seqlens: Tensor, shape: tuple[int, int], queries: slice, *, causal: bool) -> dict[str, Tensor]:
    """Returns `cu_seqlens` of keys in rows of `shape` (B, T), and `cu_seqlens_q` of the positions `queries` of each
    row. Nothing waits for a GPU.

    A kernel takes the last query of a document to be at its last key. A causal document therefore ends where the
    queries end; the rest of it is a document without queries.
    """
    (rows, length), size = shape, queries.stop - queries.start
    if causal:
        ends = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device) * length + queries.stop
        cu_seqlens = torch.cat([cu_seqlens, ends]).sort().values
    before = cu_seqlens // length * size + (cu_seqlens % length - queries.start).clamp(0, size)
    return {"cu_seqlens": cu_seqlens, "cu_seqlens_q": before.to(cu_seqlens.dtype)}


def _exchange(batch: Mapping[str, Any]) -> dict[str, Exchange]:
    """Returns the keyword argument with the batch's exchange, where processes share positions."""
    return {EXCHANGE: batch[EXCHANGE]} if EXCHANGE in batch else {}


def additive(allowed: Tensor) -> Tensor:
    """Returns the mask for models that add one to their scores: float32, 0 where `allowed`, else a very low number.

    The number is bfloat16's lowest, so that a row without an allowed position has no NaN, also under autocast. Under
    autocast to float16 it is half of float16's lowest, so that scores can be added.
    """
    zero, device = torch.zeros((), device=allowed.device), allowed.device.type
    half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    lowest = torch.finfo(torch.float16).min / 2 if half else torch.finfo(torch.bfloat16).min
    return torch.where(allowed, zero, zero + lowest)


def _register(name: str, attend: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    """Registers `attend` with Transformers; with an `exchange`, that calls it with whole rows of a part of the heads.
    What is registered raises UserError if the model hands its attention something that `attend` does not compute."""
    known = frozenset(signature(attend).parameters)

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
        given = {key: value for key, value in further.items() if value is not None and key not in WITHOUT_EFFECT}
        unknown = sorted(name for name in given if name not in known)  # torch 2.11 cannot trace a difference of sets
        gives_heads = exchange is not None and not given.keys() & {"first_query", "cu_seqlens_q"}
        if gives_heads and "s_aux" in given:  # one number a head, and the exchange gives a part of the heads
            unknown.append("s_aux")
        if unknown:
            raise UserError(_refusal(module, name if exchange is None else "sequence parallelism", unknown))
        if exchange is None:
            return attend(module, query, key, value, attention_mask, **given)

        def attend_whole_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(module, query, key, value, attention_mask, **given)[0]

        return exchange(attend_whole_rows, query, key, value), None

    AttentionInterface.register(PREFIX + name, attend_or_exchange)


def _refusal(module: nn.Module, backend: str, unknown: list[str]) -> str:
    """Returns the message for a model whose attention has the arguments `unknown`, which `backend` does not compute."""
    model_type = getattr(getattr(module, "config", None), "model_type", "unknown")
    elsewhere = set(unknown) <= signature(_attention_backends.eager).parameters.keys()
    remedy = '"attention": "sdpa" without parallel.sp_size computes it' if elsewhere else "turn it off in the config"
    return (
        f"architecture with model_type {model_type}: {type(module).__name__} passes {', '.join(unknown)} to its "
        f"attention, which {backend} does not compute: the model would be trained without it; {remedy}"
    )


for _name in BACKENDS:
    _register(_name, getattr(_attention_backends, _name))
_register(MASKED, _attention_backends.sdpa)
leave_out_cudnn = _attention_backends.leave_out_cudnn


def choose(requested: str, *, device: torch.device, length: int, **facts: Any) -> str:
    """Returns the backend for `"attention": requested` in rows of at most `length` tokens. `auto` is the `FASTEST`
    where flash supports the run, of which `why_not_flash` takes the `facts`; else sdpa. Raises UserError if the
    requested backend does not support the run."""
    if requested not in ("auto", "flash"):
        return requested
    obstacle = why_not_flash(device=device, **facts)
    if requested == "auto":
        return "sdpa" if obstacle else next((FASTEST[rows] for rows in sorted(FASTEST) if length <= rows), "flash")
    if obstacle:
        raise UserError(f'attention: flash cannot compute this run: {obstacle}; use "attention": "sdpa"')
    return "flash"


def why_not_flash(
    *, device: torch.device, precision: str, dropout: float, document_masking: str = "attention_interface",
    plain_softmax: bool = True, head_sizes: Collection[int] = (),
) -> str:  # fmt: skip
    """Returns why flash does not support a run, and what would change that; empty where it does; see `choose`."""
    if device.type != "cuda":
        return f"this run is on the {device.type}"
    if torch.cuda.is_available() and not multiplies_fast("bf16", device):
        return f"{describe_processor(device)} is older than Ampere, for which torch has it"
    if odd := [size for size in head_sizes if size % 8 or size > LARGEST_HEAD]:
        return f"heads have {odd[0]} channels, and flash takes multiples of 8 up to {LARGEST_HEAD}"
    if document_masking != "attention_interface":
        return "the architecture masks or biases its scores itself"
    if not plain_softmax:
        return "the architecture has a soft cap of scores or attention sinks"
    if dropout:
        return f"the attention has dropout {dropout}, which flash has not; set it to 0.0 in the architecture"
    return 'precision is fp32; flash needs "bf16" or "fp16"' if precision == "fp32" else ""


def find_facts(module: nn.Module, precision: str, document_masking: str) -> dict[str, Any]:
    """Returns the facts for `choose` of a run of `module`."""
    configs = [part.config for part in module.modules() if isinstance(part, PreTrainedModel)]
    known = [each for each in configs if isinstance(getattr(each, "num_attention_heads", None), int)]
    sizes = {getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads for each in known}
    return {
        "precision": precision, "dropout": dropout(module), "plain_softmax": plain_softmax(module),
        "document_masking": document_masking, "head_sizes": sorted(sizes),
    }  # fmt: skip


def wasted_scores(document_ids: np.ndarray) -> float:
    """Returns how many scores attention with a mask computes for each that documents need. Of `document_ids` (B, T)
    equal neighbours are one document, and -1 is padding."""
    needed = mean_context(document_ids) * np.count_nonzero(document_ids >= 0)
    return document_ids.size * document_ids.shape[1] / max(1.0, float(needed))


def dropout(module: nn.Module) -> float:
    """Returns the largest attention dropout of the Transformers models inside `module`."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    return max((float(getattr(model.config, name, 0.0)) for model in models for name in DROPOUTS), default=0.0)


def plain_softmax(module: nn.Module) -> bool:
    """Returns whether the Transformers models inside `module` have neither a soft cap of scores nor attention sinks."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    capped = any(getattr(model.config, "attn_logit_softcapping", None) is not None for model in models)
    return not capped and not any(hasattr(part, "sinks") for part in module.modules())


def use(module: nn.Module, backend: str) -> None:
    """Sets `backend`, one of BACKENDS or MASKED, on every Transformers model inside `module`."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = PREFIX + backend


def release(model: PreTrainedModel) -> None:
    """Restores Transformers' own attention in `model`, for saving and for use outside a run."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # a model without sdpa would get no mask at all where sdpa needs none
            part.config._attn_implementation = "sdpa" if part._supports_sdpa else "eager"
