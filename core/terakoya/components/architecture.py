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
"""The fields that `Architecture.scale_width` scales if it is not told others, by Transformers' names."""

Head = Literal["masked", "pretraining", "causal", "discriminator", "seq2seq", "body"]
DocumentMasking = Literal["attention_interface", "mask_4d", "none"]


@dataclass(frozen=True)
class TensorPartition:
    """How several processes share the matrix products of each block, and the vocabulary (`parallel.tp_size`; Shoeybi et
    al., 2019, arXiv:1909.08053). Every process computes everything else for itself.

    Modules are named within a block of `Architecture.blocks`: `attention.output.dense`.

    Attributes:
        sizes: the dimensions that are divided, by their JSON keys; each has to be a multiple of `tp_size`.
        inputs: modules whose first argument is the last activation that all processes hold whole: from there to a layer
            of `row_parallel` each process works on its own part.
        column_parallel: linear layers of which each process computes a part of the outputs -> the number of matrices
            side by side in the layer's weight, each divided by itself: 3 where the layer makes queries, keys and
            values.
        row_parallel: linear layers of which each process holds a part of the inputs. The processes' outputs are added
            up; a bias is added once.
        local: modules that every process holds whole and applies to its own part only, such as norms of heads.
        dropouts: the keys of dropout, besides that of attention, that each process applies to its own part.
        divided_attributes: module -> its attributes that count what is divided; each process sets them to its own
            count.
        vocabulary: whether each process has a part of the rows of the model's input and output embeddings, a
            `nn.Embedding` and a `nn.Linear`. False where the model uses these weights otherwise than by calling them.
        positions: whether each process may keep its own positions of hidden states in blocks, outside of what is
            divided (`parallel.sequence_parallel`). False where something there, such as a convolution, reads several
            positions.
    """

    sizes: Mapping[str, int]
    inputs: Sequence[str]
    column_parallel: Mapping[str, int]
    row_parallel: Sequence[str]
    local: Sequence[str] = ()
    dropouts: Sequence[str] = ()
    divided_attributes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    vocabulary: bool = True
    positions: bool = True


class Architecture(Component):
    """A model family. Its JSON keys are the names of its Transformers config.

    `terakoya.toolkit.architectures` has bases for models of Transformers, which leave only the fields to write.
    """

    heads: ClassVar[frozenset[Head]] = frozenset()
    """What a model can be built for."""
    document_masking: ClassVar[DocumentMasking] = "none"
    """How documents that share a row are kept apart: through Transformers' AttentionInterface, by a 4D mask, or not at
    all (packed rows are then refused by name)."""
    compile_obstacle: ClassVar[str | None] = None
    """Why torch.compile cannot compile the family's blocks, as the end of a sentence: "its experts are chosen by token
    counts". `"compile": "auto"` then compiles nothing, and "blocks" is refused. None where it can."""

    bf16_stream: ClassVar[bool] = False
    """Whether the family trains in `"precision": "bf16"` with hidden states in bf16 from its embeddings to its head and
    weights that are rounded once an optimizer step. Its linear layers, norms and embeddings must be those of torch, or
    of the families that come with terakoya; everything else runs under autocast. False is autocast for everything."""

    same_weights: ClassVar[frozenset[str]] = frozenset()
    """Types of other models in Transformers (`model_type`) with the names and shapes of this family's weights: a run
    may start from their folders, too."""
    output_layers: ClassVar[Sequence[str]] = ()
    """The last part of the names of a block's layers whose outputs are added to the hidden states, in a family with
    norms before its layers. A block whose output layers are 0 has no effect, which `"grow": "identity"` uses."""
    mup_widths: ClassVar[Sequence[str]] = ()
    """The fields that are widths, `hidden_size` among them, in a family that supports the key `mup`: a model in which
    all of them are twice as large has the same best learning rate. Dimensions of a head are not among them; a width
    that is None follows another one. `terakoya plugins check` does the coordinate check. Empty where the family does
    not support it."""
    fused_layers: ClassVar[Mapping[str, int]] = {}
    """The last part of the name of a block's layer -> the number of matrices side by side in its outputs, where it is
    not one: 3 for queries, keys and values. `"grow": "tile"` repeats each by itself."""

    partition_obstacle: ClassVar[str | None] = None
    """Why `tensor_partition` returns None for a family that cannot have one, as the end of a sentence: "its experts are
    chosen by token counts". The message that refuses `parallel.tp_size` repeats it."""

    def config(self, vocabulary: Vocabulary) -> PretrainedConfig:
        """Returns the Transformers config of this architecture over `vocabulary`."""
        raise NotImplementedError

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns a randomly initialised model. Draws from torch's global generator, which the caller has seeded."""
        raise NotImplementedError

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the last hidden states (B, T, H) of `batch`, with documents kept apart."""
        raise NotImplementedError

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the vocabulary logits (..., V) of `hidden` (..., H)."""
        raise NotImplementedError

    def next_sentence_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, 2) of "is the next sentence" / "is a random one", for the head `pretraining`."""
        raise UserError(
            f"architecture {type(self).__name__}: has no next-sentence head; set objective.next_sentence to false"
        )

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, T), for the head `discriminator`, that the token at each position of `hidden`
        (B, T, H) is not the original one."""
        raise NotImplementedError

    def scale_width(self, fraction: Fraction, widths: Sequence[str] = WIDTHS) -> Self:
        """Returns this architecture with its `widths` times `fraction`: hidden size, heads and feed-forward, not depth.
        Raises UserError if a width times `fraction` is not a whole number, or this architecture has other names for
        widths."""
        name, changed = type(self).__name__, {}
        for key in widths:
            width = getattr(self, key, None)
            if width is None and key in type(self).model_fields:
                continue
            if not isinstance(width, int):
                raise UserError(f"architecture {name}: has no {key} to scale; describe the smaller model in full")
            if width * fraction != int(width * fraction):
                sizes = [getattr(self, each, None) or 1 for each in widths]
                whole = [f"1/{part}" for part in range(2, 17) if not any(each % part for each in sizes)]
                raise UserError(
                    f"architecture {name}: {fraction} of {key} {width} is not a whole number; use "
                    + (f"one of {', '.join(whole)}, or describe" if whole else "1 alone, or describe")
                    + " the smaller model in full"
                )
            changed[key] = int(width * fraction)
        return type(self).model_validate({**self.model_dump(), **changed})

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """Returns the repeated blocks, for compilation and activation checkpointing."""
        raise NotImplementedError

    def tensor_partition(self) -> TensorPartition | None:
        """Returns how processes share each of the `blocks`; None where they cannot, and `parallel.tp_size` is
        refused."""
        return None

    def keep_stage_blocks(self, model: PreTrainedModel, stage: range) -> None:
        """Removes from `model` everything that one stage of a pipeline does not need. The stage has the blocks numbered
        `stage`: what precedes the first block is removed where the stage does not have that block, and what follows the
        last block where the stage does not have that one.

        The remaining model runs through `hidden` as before, with two differences: in every stage but the first, the
        batch holds `inputs_embeds` (B, T, H), the hidden states of the previous stage; in every stage but the last, the
        hidden states (B, T, H) that `hidden` returns are those of the stage's last block. Each stage computes positions
        and masks for itself, from the same batch.

        Override this where the blocks of a model may be on several processes (`parallel.pp_size`).
        """
        raise NotImplementedError

    def max_sequence_length(self) -> int | None:
        """Returns the length of the longest row that the model takes, None if there is no bound."""
        return None

    def flops_per_token(
        self, model: PreTrainedModel, *, context: float, head_share: float = 1.0, causal: bool | None = None
    ) -> float:
        """Returns the floating point operations that training `model`, with all its weights, needs for one real token.

        They are counted from the weights that are multiplied and the config's layers, as `flops.per_token` describes.
        Override this where that count is wrong: experts, or attention that is not plain.

        Args:
            context: positions of its own document that a position sees on average, both sides counted.
            head_share: share of the positions at which the objective runs the head.
            causal: whether a position sees only the positions before it; None takes the answer from the model's class.
        """
        from terakoya.components import flops

        try:
            blocks = self.blocks(model)
        except NotImplementedError:  # only compilation and activation checkpointing require them
            blocks = ()
        return flops.per_token(model, blocks, context=context, head_share=head_share, causal=causal)
