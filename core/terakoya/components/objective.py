"""Training objectives, their micro-batches and their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
            `document_ids` for padding, and any arrays that the objective adds.
        counts: name -> int: the denominators of losses and metrics, which the loop sums over all ranks and
            micro-batches. `tokens` (real positions) is always present.
    """

    arrays: Mapping[str, np.ndarray]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class LossTerm:
    """A number that training reports: the sum that a module returns under this name, divided by a global count.

    A term with a `weight` is a loss, which is added to the objective with that weight; a term without one is a metric.
    With `bins` the module returns that many sums, (bins,), which are not reported themselves:
    `Objective.derive_metrics` reads them. `bits` is for a term that is -log p of a token of the text, in nats: where
    the size of the text is known, its mean is also reported in bits for each character and byte of text, under the
    names `{bits}_per_character` and `{bits}_per_byte`, so that models with different tokenizers compare.
    """

    count: str
    weight: float | None = None
    bins: int | None = None
    bits: str | None = None


class Objective(Component):
    """A training objective: how rows are cut, which tokens are corrupted, which losses are computed."""

    single_forward: ClassVar[bool] = False
    """Whether the module that `build` returns holds one model, calls `Architecture.hidden` on it once, with the batch
    as it is, and needs nothing else but the head: it can then be split into the stages of a pipeline
    (`Architecture.keep_stage_blocks`)."""

    compares_examples: ClassVar[bool] = False
    """Whether the loss of an example depends on the embeddings of all examples of the step, as where all others are its
    negatives. The loop then calls `compare` with those of all micro-batches and processes. The module that `build`
    returns has a forward that ends in `toolkit.objectives.compared_examples.forward_examples`."""

    def row_layout(self) -> Layout:
        """Returns how rows are cut from a token store."""
        raise NotImplementedError

    def check(self, vocabulary: Vocabulary, *, sequence_length: int) -> None:
        """Raises UserError where the objective cannot use `vocabulary`, or rows of `sequence_length`. Called once
        before a run."""

    def terms(self) -> Mapping[str, LossTerm]:
        """Returns a term, with its count and weight, for every name that the forward of `build(...)` returns."""
        raise NotImplementedError

    def architectures(self, architecture: Architecture) -> Sequence[Architecture]:
        """Returns those of the models that `build` makes of `architecture`, which comes first. By default the others
        are the architectures among the settings; override this where another is derived from it."""
        return [architecture, *(value for value in dict(self).values() if isinstance(value, Architecture))]

    def sums_by_position(self) -> bool:
        """Returns whether every term is a sum over positions, and each position's summand depends on its own hidden
        state only. Processes can then share the positions of a row (`parallel.sp_size`): each process receives its
        slice of the arrays (B, T), but all of `document_ids`, and the `masked_positions` and `masked_labels` (K,)
        within its slice."""
        return False

    def derive_metrics(self, sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
        """Returns further numbers to report: those that follow from sums over all ranks but are not a sum divided by a
        count.

        `sums` holds the terms since the last report, float64, () or (bins,); `counts` holds their denominators.
        """
        return {}

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """Returns the micro-batch of `rows`: a pure function of the rows, their keys and `rows.progress`, the share of
        the run that is finished, on which for example the share of masked tokens may depend."""
        raise NotImplementedError

    def compare(self, embeddings: torch.Tensor, real: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns the value (E,) of every term for each of the examples of a step, and 0 where it is none; for
        objectives that compare examples. The first term is the only loss.

        Args:
            embeddings: (E, V, H) float32, V views of each example.
            real: (E,) bool, False for empty slots, which must not change the values of others.
        """
        raise NotImplementedError

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """Returns the root module. Its forward takes a batch's tensors and returns name -> float32 sum, a scalar or
        (bins,)."""
        raise NotImplementedError

    def exports(self, module: torch.nn.Module) -> Mapping[str, PreTrainedModel]:
        """Returns the models to save, by sub-folder; "" is the folder itself. By default that of `module.model`."""
        return {"": module.model}

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """Returns the floating point operations of one real token, forward and backward, for the reported TFLOP/s.

        By default, those of all models in `exports(module)`, each with its head at every position. Override this where
        heads see fewer positions, or where models are of other architectures. `context` is as in
        `Architecture.flops_per_token`.
        """
        models = self.exports(module).values()
        return sum(architecture.flops_per_token(model, context=context) for model in models)

    def load_models(self, module: torch.nn.Module, models: Mapping[str, PreTrainedModel]) -> None:
        """Sets the weights of `module` so that it exports `models`, which have the names and shapes of
        `exports(module)`. A run that starts from finished models calls this. Override it where `exports` computes
        weights; it may change `models`. Raises UserError if `models` are inconsistent with each other; `module` is then
        unchanged."""
        from terakoya.components.copy_weights import copy_weights

        copy_weights(module, self.exports(module), models)
