"""Model families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from terakoya.components.base import Component
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

WIDTHS = ("hidden_size", "num_attention_heads", "intermediate_size")
"""What `Architecture.scaled` scales, by Transformers' names."""

Head = Literal["masked", "pretraining", "causal", "discriminator", "seq2seq", "body"]
Isolation = Literal["interface", "mask4d", "none"]


@dataclass(frozen=True)
class TensorPartition:
    """How several processes share the matrix products of each block (`parallel.tp_size`; Shoeybi et al., 2019,
    arXiv:1909.08053). All else every process computes for itself.

    Modules are named within a block of `Architecture.blocks`: `attention.output.dense`.

    Attributes:
        sizes: what is cut, by the JSON key that says it; each has to be a multiple of `tp_size`.
        entries: modules whose first argument is the last that all processes have whole: from there to a layer of `rows`
            each works on its own part.
        columns: linear layers of whose outputs each process computes a part -> how many matrices lie side by side in
            the layer's weight, each of which is cut by itself: 3 where it makes queries, keys and values.
        rows: linear layers of whose inputs each process has a part. Their outputs are added up; a bias comes once.
        on_parts: modules that every process has whole and applies to its own part alone, such as norms of heads.
        counts: module -> its attributes that count what is cut, and become that of the part.
    """

    sizes: Mapping[str, int]
    entries: Sequence[str]
    columns: Mapping[str, int]
    rows: Sequence[str]
    on_parts: Sequence[str] = ()
    counts: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Architecture(Component):
    """A model family. JSON keys are the names of its Transformers config."""

    heads: ClassVar[frozenset[Head]] = frozenset()
    isolation: ClassVar[Isolation] = "none"
    """How documents in one row are kept apart: through Transformers' AttentionInterface, by a 4D mask, or not at all
    (packed rows are then refused by name)."""

    def config(self, vocabulary: Vocabulary) -> PretrainedConfig:
        """The Transformers config of this architecture over `vocabulary`."""
        raise NotImplementedError

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """A freshly initialised model. Draws from torch's global generator, which the caller has seeded."""
        raise NotImplementedError

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H) of `batch`, documents kept apart."""
        raise NotImplementedError

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The vocabulary logits (..., V) of `hidden` (..., H)."""
        raise NotImplementedError

    def next_sentence_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The logits (B, 2) of "is the next sentence" / "is a random one", for the head `pretraining`."""
        raise UserError(
            f"architecture {type(self).__name__}: has no next-sentence head; set objective.next_sentence to false"
        )

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The logits (B, T), for the head `discriminator`, that the token behind each of `hidden` (B, T, H) is not the
        original one."""
        raise NotImplementedError

    def scaled(self, fraction: Fraction) -> Self:
        """This architecture with its width times `fraction`: hidden size, heads and feed-forward, not depth.

        Raises:
            UserError: a width times `fraction` is no whole number, or this architecture has other names for them.
        """
        name, changed = type(self).__name__, {}
        for key in WIDTHS:
            width = getattr(self, key, None)
            if not isinstance(width, int):
                raise UserError(f"architecture {name}: has no {key} to scale; describe the smaller model in full")
            if width * fraction != int(width * fraction):
                raise UserError(f"architecture {name}: {fraction} of {key} {width} is no whole number")
            changed[key] = int(width * fraction)
        return type(self).model_validate({**self.model_dump(), **changed})

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The repeated blocks, for compilation and activation checkpointing."""
        raise NotImplementedError

    def tensor_partition(self) -> TensorPartition | None:
        """How processes share each of the `blocks`; None where they cannot, and `parallel.tp_size` is refused."""
        return None

    def cut(self, model: PreTrainedModel, kept: range) -> None:
        """Takes out of `model` what a stage of a pipeline with its blocks `kept`, neighbours, does without: what stands
        before the first block where that is not among them, what stands behind the last where that is not.

        What is left runs by `hidden` as before, save that behind the first stage the batch holds `inputs_embeds`
        (B, T, H), the hidden states of the stage before, and that before the last the hidden states (B, T, H) that come
        out are those of the last block kept. Positions and masks are each stage's own business, from the same batch.

        To be written where the blocks of a model may lie on several processes (`parallel.pp_size`).
        """
        raise NotImplementedError

    def max_sequence_length(self) -> int | None:
        """The longest row the model can take, None if there is no bound."""
        return None

    def flops_per_token(
        self, model: PreTrainedModel, *, context: float, head_share: float = 1.0, causal: bool | None = None
    ) -> float:
        """Floating point operations that training `model`, with all its weights, must do for one real token.

        Counted from the weights that are multiplied and the config's layers, as `flops.per_token` describes; to be
        written where that is not what happens: experts, attention that is no plain one.

        Args:
            context: positions of its own document that a position sees on average, both sides counted.
            head_share: share of the positions at which the objective runs the head.
            causal: whether a position sees only what is before it; None asks the model's class.
        """
        from terakoya.components import flops

        try:
            blocks = self.blocks(model)
        except NotImplementedError:  # only compilation and activation checkpointing cannot do without
            blocks = ()
        return flops.per_token(model, blocks, context=context, head_share=head_share, causal=causal)
