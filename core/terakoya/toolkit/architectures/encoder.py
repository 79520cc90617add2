"""Encoders of Transformers: a body with `embeddings` and an `encoder` of layers, and a vocabulary head.

torch is imported inside functions, so that listing architectures stays quick.
Letters in shapes: B rows, T positions, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from terakoya.components import DocumentMasking, Head, TensorPartition, Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


TEXT_END_IDS: Mapping[str, str] = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep"}
"""`config_ids` of families whose config also names the tokens at both ends of a text, CLS and SEP."""


class EncoderArchitecture(TransformersArchitecture):
    """The base of encoder families. A family adds its fields, `config_class`, `model_classes` and `vocabulary_head`.

    By default it fits models in BERT's shape. With `document_masking = "mask_4d"` the body's `encoder` receives a
    mask (B, 1, T, T) bool as its second argument, as DeBERTa's does.
    """

    document_masking: ClassVar[DocumentMasking] = "attention_interface"
    vocabulary_head: ClassVar[Sequence[str]] = ()
    """The modules of the model that turn hidden states into vocabulary logits, in the order in which they run."""
    discriminator_head: ClassVar[Sequence[str]] = ()
    """The modules of a token classifier that turn hidden states into its two labels, original and replaced, in the
    order in which they run; for families whose `discriminator` is a token classifier of Transformers."""
    block_list: ClassVar[str] = "encoder.layer"
    """The body's module that lists the layers."""
    calls_whole_body: ClassVar[bool] = False
    """Whether the body passes `attention.arguments` to its layers when it is called; if not, its embeddings and its
    encoder are called one after the other."""
    positions_follow_padding: ClassVar[bool] = False
    """Whether the model counts positions from the padding id + 1, as RoBERTa does; its config then has that many more
    positions than `max_position_embeddings`, the longest row."""

    def config(self, vocabulary: Vocabulary) -> PretrainedConfig:
        """Returns the config. Where its class has ids of its own for the tokens at both ends of a text, which
        `config_arguments` do not set, they become the vocabulary's CLS and SEP."""
        config, arguments = super().config(vocabulary), self.config_arguments(vocabulary)
        for name, token in TEXT_END_IDS.items():
            if name != "pad_token_id" and name not in arguments and getattr(config, name, None) is not None:
                setattr(config, name, getattr(vocabulary, token))
        return config

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        arguments = super().config_arguments(vocabulary)
        if self.positions_follow_padding:
            arguments["max_position_embeddings"] += first_position(vocabulary.pad)
        return arguments

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns a randomly initialised model; the config of a token classifier names its two labels."""
        model = super().build(vocabulary, head)
        if head == "discriminator" and self.discriminator_head:
            model.config.id2label = {0: "original", 1: "replaced"}
            model.config.label2id = {"original": 0, "replaced": 1}
        return model

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the last hidden states (B, T, H); documents in one row do not see each other."""
        from terakoya.toolkit.architectures import attention

        if self.positions_follow_padding:
            batch = {**batch, "position_ids": batch["position_ids"] + first_position(model.config.pad_token_id)}
        body, documents = model.base_model, batch["document_ids"]
        given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        if self.document_masking == "mask_4d":  # an encoder with its own attention, which takes the mask alone
            embedded = body.embeddings(**given, token_type_ids=batch.get("token_type_ids"), mask=documents >= 0)
            mask = attention.document_mask(documents)
            return body.encoder(embedded, mask, output_hidden_states=False).last_hidden_state
        arguments = attention.arguments(model, batch)
        if self.calls_whole_body:
            return body(**given, **arguments).last_hidden_state
        embedded = body.embeddings(**given, token_type_ids=batch.get("token_type_ids"))
        if hasattr(body, "embeddings_project"):  # where embeddings are narrower than the layers
            embedded = body.embeddings_project(embedded)
        return body.encoder(embedded, **arguments).last_hidden_state

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the vocabulary logits (..., V) of `hidden` (..., H), computed by the modules of `vocabulary_head`."""
        if not self.vocabulary_head:
            raise UserError(
                f"architecture {type(self).__name__}: has no vocabulary_head; name the modules, or write `logits`"
            )
        for name in self.vocabulary_head:
            hidden = model.get_submodule(name)(hidden)
        return hidden

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, T) that a token was replaced, of `hidden` (B, T, H): the label `replaced` minus the
        label `original` of the modules of `discriminator_head`."""
        if not self.discriminator_head:
            return super().replaced_logits(model, hidden)
        for name in self.discriminator_head:
            hidden = model.get_submodule(name)(hidden)
        return hidden[..., 1] - hidden[..., 0]

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """Returns the encoder's layers."""
        return list(model.base_model.get_submodule(self.block_list))


def first_position(pad: int | None) -> int:
    """Returns the position of a document's first token in models that count positions from the padding id + 1."""
    return (pad or 0) + 1


def layer_partition(num_attention_heads: int, intermediate_size: int) -> TensorPartition:
    """Returns how processes share layers in BERT's shape: by heads, and by the middle of the feed-forward."""
    return TensorPartition(
        sizes={"num_attention_heads": num_attention_heads, "intermediate_size": intermediate_size},
        inputs=("attention.self", "intermediate"),
        column_parallel={
            **{f"attention.self.{name}": 1 for name in ("query", "key", "value")},
            "intermediate.dense": 1,
        },
        row_parallel=("attention.output.dense", "output.dense"),
        divided_attributes={"attention.self": ("num_attention_heads", "all_head_size")},
    )


def share_embeddings(owner: PreTrainedModel, other: PreTrainedModel) -> None:
    """Makes `other` use the whole embedding module of `owner`: words, positions, token types, norm. Raises UserError if
    the two modules do not have the same tensors; the message names one that differs."""
    mine, theirs = (
        {name: tuple(value.shape) for name, value in model.base_model.embeddings.named_parameters()}
        for model in (owner, other)
    )
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise UserError(
                f"embeddings cannot be shared: {name} is {mine.get(name, 'absent')} in {type(owner).__name__} and "
                f"{theirs.get(name, 'absent')} in {type(other).__name__}"
            )
    other.base_model.embeddings = owner.base_model.embeddings
