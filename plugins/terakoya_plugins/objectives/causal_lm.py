"""Causal language modelling: each token is predicted from the tokens before it in its document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from terakoya import hookimpl
from terakoya.components import Architecture, Batch, LossTerm, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.objectives import causal_objective

if TYPE_CHECKING:
    import numpy as np
    import torch


class CausalLM(Objective):
    """Settings of causal language modelling."""

    single_forward: ClassVar[bool] = True

    layout: Literal["packed", "stream", "megatron"] = "packed"
    """`packed`: several isolated documents in a row. `stream`: documents joined and split anywhere; a token sees all
    tokens before it in its row. `megatron`: as `stream`, in Megatron-LM's order of documents and rows from the same
    seed."""
    bos: bool = False
    """Whether each document begins with the tokenizer's beginning-of-sequence token."""
    append_eos: bool = True
    """Whether a document ends with the tokenizer's end-of-sequence token where the store has none."""
    eod_mask_loss: bool = False
    """Whether the token after the end of a document is left out of the loss, in layouts that join documents."""
    z_loss: NonNegativeFloat = 0.0
    """The weight of log^2 Z, where Z is the sum of a position's exponentiated logits (PaLM used 1e-4)."""
    samples: PositiveInt | None = None
    """Of `megatron`: the number of rows of the whole run (its steps times its global batch), from which Megatron-LM
    computes how many epochs it shuffles together. Without it each epoch is shuffled separately. Unit: rows."""
    head_positions: PositiveInt | None = None
    """Number of positions whose logits are in memory at once: less memory, smaller products. Their gradients are formed
    with them; with a `z_loss` the logits are computed again instead. All positions if not given."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.samples is not None and self.layout != "megatron":
            raise ValueError(f'samples is for layout "megatron", got layout "{self.layout}"')
        if self.eod_mask_loss and self.layout == "packed":
            raise ValueError('eod_mask_loss is for layouts that join documents; in "packed" no token follows an end')
        return self

    def row_layout(self) -> Layout:
        return Layout(
            kind=self.layout,
            framing="causal",
            bos=self.bos,
            append_eos=self.append_eos,
            eod_mask_loss=self.eod_mask_loss,
            samples=self.samples,
        )

    def terms(self) -> Mapping[str, LossTerm]:
        """`lm_loss` and `token_accuracy` over all predicted tokens; `z_loss` if it has a weight."""
        return causal_objective.terms(z_loss=self.z_loss)

    def sums_by_position(self) -> bool:
        return True

    def derive_metrics(self, sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
        return causal_objective.perplexity(sums, counts)

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """`rows` (B, T) with `labels` (B, T); see `causal_objective.batch`."""
        return causal_objective.batch(rows, whole_rows=self.layout != "packed")

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        return causal_objective.build(
            "causal_lm", architecture, vocabulary, z_loss=self.z_loss, head_positions=self.head_positions
        )


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    return {"causal_lm": CausalLM}
