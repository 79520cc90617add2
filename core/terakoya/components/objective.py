"""What is learnt, and the micro-batches it is learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from terakoya.components.architecture import Architecture
from terakoya.components.base import Component
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from terakoya.components.rows import Layout, Rows


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the host.

    Attributes:
        arrays: name -> array, row-first: `input_ids`, `position_ids`, `document_ids` (B, T) int64, -1 in
            `document_ids` for padding, and whatever the objective adds.
        counts: name -> int: what each loss and metric is divided by, summed over all ranks and micro-batches.
            `tokens` (real positions) is always there.
    """

    arrays: Mapping[str, np.ndarray]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Term:
    """A number that training reports: the sum a module returns under this name, divided by a global count.

    `weight` None is a metric; a number makes it a loss that is added to the objective with that weight. With `bins` the
    module returns that many sums, (bins,), which are not reported themselves: `Objective.derived` reads them.
    """

    count: str
    weight: float | None = None
    bins: int | None = None


class Objective(Component):
    """What is learnt: how rows are cut, what is corrupted, which losses come out."""

    hidden_once: ClassVar[bool] = False
    """Whether what `build` makes holds one model, calls `Architecture.hidden` on it once, with the batch as it is, and
    of the rest needs the head alone: it can then be cut into the stages of a pipeline (`Architecture.cut`)."""

    def row_layout(self) -> Layout:
        """How rows are cut from a token store."""
        raise NotImplementedError

    def check(self, vocabulary: Vocabulary, *, sequence_length: int) -> None:
        """Called once before a run: raises UserError where `vocabulary`, or rows of `sequence_length`, do not do."""

    def terms(self) -> Mapping[str, Term]:
        """Every name that `build(...)`'s forward returns, with its count and weight."""
        raise NotImplementedError

    def sums_by_position(self) -> bool:
        """Whether every term is a sum over positions, to which a position adds what follows from its own hidden state.
        Processes may then share the positions of a row (`parallel.sp_size`): of arrays (B, T) each has its slice, but
        all of `document_ids`, and of `masked_positions` and `masked_labels` (K,) those within its slice."""
        return False

    def derived(self, sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
        """Numbers to report beside the terms' means: what follows from sums over all ranks but is no sum over a count.

        `sums` holds the terms seen since the last report, float64, () or (bins,); `counts` what they are divided by.
        """
        return {}

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """The micro-batch of `rows`: a pure function of rows and their keys."""
        raise NotImplementedError

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """The one root module. Its forward takes a batch's tensors and returns name -> float32 sum, a scalar or
        (bins,)."""
        raise NotImplementedError

    def exports(self, module: torch.nn.Module) -> Mapping[str, PreTrainedModel]:
        """The models to save, by sub-folder; "" is the folder itself."""
        raise NotImplementedError

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """Floating point operations of one real token, forward and backward, for the reported TFLOP/s.

        All that `exports(module)` names, each with its head at every position; to be written where heads see fewer, or
        where models are of other architectures. `context` as in `Architecture.flops_per_token`.
        """
        models = self.exports(module).values()
        return sum(architecture.flops_per_token(model, context=context) for model in models)

    def adopt(self, module: torch.nn.Module, models: Mapping[str, PreTrainedModel]) -> None:
        """Makes `module` one that exports `models`, which have the names and shapes of `exports(module)`: how a run
        starts from finished models. To be written where `exports` computes weights; may change `models`.

        Raises:
            UserError: `models` do not go together. Nothing has changed then.
        """
        from terakoya.components import copy_weights as adoption

        adoption.copy_weights(module, self.exports(module), models)
