"""Instruction tuning: the answers of conversations are predicted; questions are read, but not learnt.

Wei et al., 2021 (arXiv:2109.01652). Conversations come from `terakoya prepare --conversations`, which formats them with
a chat template and marks every token of an answer, including its end token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt

from terakoya.components import Architecture, Batch, LossTerm, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.objectives import causal_objective
from terakoya_conversations.rows import Conversations

if TYPE_CHECKING:
    import numpy as np
    import torch


class Instruction(Objective):
    """Settings of instruction tuning."""

    single_forward: ClassVar[bool] = True

    layout: Literal["packed", "padded"] = "packed"
    """`packed`: several isolated conversations in a row. `padded`: one conversation in a row."""
    loss_on: Literal["answers", "last_answer", "all"] = "answers"
    """The predicted tokens: all answers, the last answer of each conversation, or all tokens, also of questions and
    template."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """Whether conversations longer than a row are truncated or left out. None continues in another row, where the model
    would not see its question; one whose answers, or whose last answer with `last_answer`, lie beyond the row is left
    out."""
    z_loss: NonNegativeFloat = 0.0
    """The weight of log^2 Z, where Z is the sum of a position's exponentiated logits (PaLM used 1e-4)."""
    head_positions: PositiveInt | None = None
    """Number of positions whose logits are in memory at once: less memory, smaller products. Their gradients are formed
    with them; with a `z_loss` the logits are computed again instead. All positions if not given."""

    def row_layout(self) -> Layout:
        """Causal rows of whole conversations."""
        return Layout(
            kind=self.layout,
            framing="causal",
            append_eos=False,
            whole=Conversations(loss_on=self.loss_on, too_long=self.too_long),
        )

    def terms(self) -> Mapping[str, LossTerm]:
        """`lm_loss` and `token_accuracy` over all predicted tokens; `z_loss` if it has a weight."""
        return causal_objective.terms(z_loss=self.z_loss)

    def sums_by_position(self) -> bool:
        """True: each token is predicted from one hidden state."""
        return True

    def derive_metrics(self, sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
        """`perplexity`; see `causal_objective.perplexity`."""
        return causal_objective.perplexity(sums, counts)

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """`rows` (B, T) with `labels` (B, T); see `causal_objective.batch`."""
        return causal_objective.batch(rows, whole_rows=self.layout == "padded")

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """The root module with a randomly initialised model."""
        return causal_objective.build(
            "instruction", architecture, vocabulary, z_loss=self.z_loss, head_positions=self.head_positions
        )
