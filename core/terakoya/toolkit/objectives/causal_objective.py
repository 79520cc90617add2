"""The shared parts of objectives that predict the next token: terms, perplexity, batches and the root module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from terakoya.components import Architecture, Batch, LossTerm
from terakoya.components.rows import Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.objectives.check_head import check_head

if TYPE_CHECKING:
    from terakoya.toolkit.objectives._causal_module import CausalModule


def terms(*, z_loss: float) -> Mapping[str, LossTerm]:
    """Returns the terms `lm_loss` and `token_accuracy` over all predicted tokens, and `z_loss` if it has a weight."""
    terms = {"lm_loss": LossTerm("targets", 1.0, bits="bits"), "token_accuracy": LossTerm("targets")}
    return terms | ({"z_loss": LossTerm("targets", z_loss)} if z_loss else {})


def perplexity(sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
    """Returns `perplexity`, the exponential of the mean `lm_loss`, or nothing where it is too large for a float."""
    if not counts["targets"] or "lm_loss" not in sums:
        return {}
    mean = float(sums["lm_loss"]) / counts["targets"]
    return {"perplexity": math.exp(mean)} if mean < 700 else {}


def batch(rows: Rows, *, whole_rows: bool) -> Batch:
    """Returns the batch of `rows` (B, T) with `labels` (B, T), the next token, -100 where there is none.

    With `whole_rows` each row is one document. Counts: targets, tokens.
    """
    from terakoya.toolkit.architectures.attention import WHOLE_ROWS

    assert rows.labels is not None, "the layout is causal"
    arrays = {
        "input_ids": rows.tokens.astype(np.int64),
        "position_ids": rows.position_ids.astype(np.int64),
        "document_ids": rows.document_ids.astype(np.int64),
        "labels": rows.labels.astype(np.int64),
    }
    if whole_rows:
        arrays[WHOLE_ROWS] = np.empty(0, np.int64)
    counts = {
        "targets": int(np.count_nonzero(rows.labels >= 0)),
        "tokens": int(np.count_nonzero(rows.document_ids >= 0)),
    }
    return Batch(arrays=arrays, counts=counts)


def build(
    name: str, architecture: Architecture, vocabulary: Vocabulary, *, z_loss: float, head_positions: int | None
) -> CausalModule:
    """Returns the root module of the objective `name` over a randomly initialised model. Raises UserError for an
    architecture without a causal head."""
    from terakoya.toolkit.objectives._causal_module import CausalModule

    check_head(name, architecture, "causal")
    model = architecture.build(vocabulary, "causal")
    return CausalModule(architecture, model, z_loss=z_loss > 0, head_positions=head_positions)
