"""The objective `example`: each token is masked with a fixed probability, and predicted from the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field
from terakoya import hookimpl
from terakoya.components import Architecture, Batch, LossTerm, Objective, Vocabulary
from terakoya.components.rows import Layout, Rows
from terakoya.errors import UserError
from terakoya.toolkit.random_keys import bernoulli, draws

if TYPE_CHECKING:  # torch and transformers are imported inside methods, so that the command line stays quick
    import torch
    from transformers import PreTrainedModel


class Example(Objective):
    """Masked language modelling in its simplest form. Fields are the keys of the parameter JSON."""

    layout: Literal["packed", "stream", "lines"] = "packed"
    """How documents become rows."""
    probability: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """The share of tokens that are hidden."""

    def row_layout(self) -> Layout:
        return Layout(kind=self.layout)

    def terms(self) -> Mapping[str, LossTerm]:
        """Returns the names that the module returns, with the count that divides each; a weight makes it a loss."""
        return {"example_loss": LossTerm("hidden", 1.0)}

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """Returns the batch of `rows` (B, T). This is a pure function: random numbers come from the rows' keys, never
        from a generator, so that a run resumes exactly and may use any number of processes."""
        if vocabulary.mask is None:
            raise UserError("objective example: the tokenizer has no [MASK]; use one that has")
        real = rows.document_ids >= 0
        drawn = draws(rows.keys[:, None], "example", np.arange(rows.tokens.shape[1]))
        chosen = real & ~vocabulary.is_special[rows.tokens] & bernoulli(drawn, self.probability)
        arrays = {
            "input_ids": np.where(chosen, vocabulary.mask, rows.tokens).astype(np.int64),
            "position_ids": rows.position_ids.astype(np.int64),
            "document_ids": rows.document_ids.astype(np.int64),
            "labels": np.where(chosen, rows.tokens, -100).astype(np.int64),
        }
        return Batch(arrays=arrays, counts={"tokens": int(real.sum()), "hidden": int(chosen.sum())})

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """Returns the root module. Its forward returns sums, not means: the loop divides by counts over all
        processes."""
        import torch

        if "masked" not in architecture.heads:
            raise UserError(f"objective example: architecture {type(architecture).__name__} has no head 'masked'")

        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = architecture.build(vocabulary, "masked")

            def forward(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
                logits = architecture.logits(self.model, architecture.hidden(self.model, batch)).float()
                return {
                    "example_loss": torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
                    )
                }

        return Module()

    def exports(self, module: torch.nn.Module) -> Mapping[str, PreTrainedModel]:
        return {"": module.model}


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    """Registers `example`: `"objective": {"type": "example"}`."""
    return {"example": Example}
