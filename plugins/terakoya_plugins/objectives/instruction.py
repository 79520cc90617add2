"""Instruction tuning: the answers of conversations are predicted, what they answer is read and not learnt.

Wei et al., 2021 (arXiv:2109.01652). Conversations come from `terakoya prepare --conversations`, which writes them with
a chat template and marks every token of an answer, its end included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Batch, LossTerm, Objective
from terakoya.components.rows import Conversations, Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.objectives import causal_objective

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel


class Instruction(Objective):
    """Settings of instruction tuning."""

    single_forward: ClassVar[bool] = True

    layout: Literal["packed", "padded"] = "packed"
    """`packed`: conversations side by side, each seen by itself alone. `padded`: one in each row."""
    loss_on: Literal["answers", "last_answer", "all"] = "answers"
    """What is predicted: all answers, the last one of each conversation, or every token, questions and template too."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What becomes of conversations longer than a row: their end is cut off, or they are left out. None goes on in
    another row, where its question would not be seen."""
    z_loss: NonNegativeFloat = 0.0
    """The weight of log^2 Z, Z being what a position's exponentiated logits add up to (PaLM's was 1e-4)."""
    head_positions: PositiveInt | None = None
    """Positions whose logits stand in memory at once, others being computed again for their gradient: less memory, more
    work. All where not given."""

    def row_layout(self) -> Layout:
        """Causal rows of whole conversations."""
        return Layout(
            kind=self.layout,
            framing="causal",
            append_eos=False,
            conversations=Conversations(loss_on=self.loss_on, too_long=self.too_long),
        )

    def terms(self) -> Mapping[str, LossTerm]:
        """`lm_loss` and `token_accuracy` over all predicted tokens; with a weight for it `z_loss`."""
        return causal_objective.terms(z_loss=self.z_loss)

    def sums_by_position(self) -> bool:
        """Each token is predicted from its own hidden state."""
        return True

    def derive_metrics(self, sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
        """`perplexity`; see `causal_objective.perplexity`."""
        return causal_objective.perplexity(sums, counts)

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """`rows` (B, T) with `labels` (B, T); see `causal_objective.batch`."""
        return causal_objective.batch(rows, whole_rows=self.layout == "padded")

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """The root module over a freshly initialised model."""
        return causal_objective.build(
            "instruction", architecture, vocabulary, z_loss=self.z_loss, head_positions=self.head_positions
        )

    def exports(self, module: torch.nn.Module) -> Mapping[str, PreTrainedModel]:
        """One model, in the folder itself."""
        return {"": module.model}


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    """Offers `instruction`."""
    return {"instruction": Instruction}
