"""Causal language modelling: each token is predicted from those that stand before it in its document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from terakoya import hookimpl
from terakoya.components import Architecture, Batch, Objective, Term
from terakoya.data.rows import Layout, Rows
from terakoya.data.vocab import Vocabulary
from terakoya.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class CausalLM(Objective):
    """Settings of causal language modelling."""

    layout: Literal["packed", "stream", "megatron"] = "packed"
    """`packed`: documents side by side, each seen by itself alone. `stream`: documents joined, cut anywhere; a token
    sees what stands before it in its row. `megatron`: the same in the order in which Megatron-LM draws documents and
    rows from the same seed."""
    bos: bool = False
    """Whether each document begins with the tokenizer's beginning-of-sequence token."""
    append_eos: bool = True
    """Whether a document is ended by the tokenizer's end-of-sequence token where the store holds none."""
    eod_mask_loss: bool = False
    """Whether the token after the end of a document is left out of the loss, in layouts that join documents."""
    z_loss: NonNegativeFloat = 0.0
    """The weight of log^2 Z, Z being what a position's exponentiated logits add up to (PaLM's was 1e-4)."""
    samples: PositiveInt | None = None
    """Of `megatron`: the rows that the run takes in all (its steps times its global batch), from which Megatron-LM
    works out how many epochs it shuffles together. One epoch after another where not given."""
    head_positions: PositiveInt | None = None
    """Positions whose logits stand in memory at once, others being computed again for their gradient: less memory, more
    work. All where not given."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.samples is not None and self.layout != "megatron":
            raise ValueError(f'samples is for layout "megatron", got layout "{self.layout}"')
        if self.eod_mask_loss and self.layout == "packed":
            raise ValueError('eod_mask_loss is for layouts that join documents: in "packed" nothing follows an end')
        return self

    def row_layout(self) -> Layout:
        """Causal rows as `layout` says."""
        return Layout(
            kind=self.layout,
            framing="causal",
            bos=self.bos,
            append_eos=self.append_eos,
            eod_mask_loss=self.eod_mask_loss,
            samples=self.samples,
        )

    def terms(self) -> Mapping[str, Term]:
        """`lm_loss` and `token_accuracy` over all predicted tokens; with a weight for it `z_loss`."""
        terms = {"lm_loss": Term("targets", 1.0), "token_accuracy": Term("targets")}
        return terms | ({"z_loss": Term("targets", self.z_loss)} if self.z_loss else {})

    def derived(self, sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
        """`perplexity`, the exponential of the mean `lm_loss`; left out where it is too large for a number."""
        if not counts["targets"] or "lm_loss" not in sums:
            return {}
        mean = float(sums["lm_loss"]) / counts["targets"]
        return {"perplexity": math.exp(mean)} if mean < 700 else {}

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """`rows` (B, T) with `labels` (B, T), the token that follows, -100 where nothing is predicted.

        Counts: targets, tokens.
        """
        from terakoya.attention import WHOLE_ROWS

        assert rows.labels is not None, "the layout is causal"
        arrays = {
            "input_ids": rows.tokens.astype(np.int64),
            "position_ids": rows.position_ids.astype(np.int64),
            "document_ids": rows.document_ids.astype(np.int64),
            "labels": rows.labels.astype(np.int64),
        }
        if self.layout != "packed":
            arrays[WHOLE_ROWS] = np.empty(0, np.int64)
        counts = {
            "targets": int(np.count_nonzero(rows.labels >= 0)),
            "tokens": int(np.count_nonzero(rows.document_ids >= 0)),
        }
        return Batch(arrays=arrays, counts=counts)

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """The root module over a freshly initialised model."""
        from terakoya_plugins.objectives._causal_lm_module import CausalLMModule

        if "causal" not in architecture.heads:
            raise UserError(
                f"objective causal_lm: architecture {type(architecture).__name__} has no head 'causal', only "
                f"{sorted(architecture.heads)}"
            )
        model = architecture.build(vocabulary, "causal")
        return CausalLMModule(architecture, model, z_loss=self.z_loss > 0, head_positions=self.head_positions)

    def exports(self, module: torch.nn.Module) -> Mapping[str, PreTrainedModel]:
        """One model, in the folder itself."""
        return {"": module.model}


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    """Offers `causal_lm`."""
    return {"causal_lm": CausalLM}
