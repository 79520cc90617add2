"""What Transformers' encoders in BERT's shape have in common: `embeddings`, then an `encoder` of layers.

torch is imported inside functions, so that architectures name this module at their top.
Letters in shapes: B rows, T positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from terakoya.components import TensorPartition
from terakoya.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def hidden(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The last hidden states (B, T, H) of the body of `model`; documents in one row never see each other."""
    from terakoya.toolkit.architectures import attention

    body = model.base_model
    embedded = body.embeddings(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        token_type_ids=batch.get("token_type_ids"),
    )
    if hasattr(body, "embeddings_project"):  # where embeddings are narrower than the layers
        embedded = body.embeddings_project(embedded)
    return body.encoder(embedded, **attention.arguments(model, batch)).last_hidden_state


def hidden_by_mask(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], *, lowered: tuple[str, ...] = ()
) -> torch.Tensor:
    """The last hidden states (B, T, H) of the body of `model`, whose encoder has its own attention and takes a mask
    (B, 1, T, T) bool for it: which position may look at which.

    Under autocast the encoder's weights with names in `lowered` are used in the lower precision. Autocast itself does
    that in products alone: a bias that the encoder adds on its own would make float32 of what it is added to.
    """
    import torch
    from torch.func import functional_call

    from terakoya.toolkit.architectures import attention

    body = model.base_model
    documents = batch["document_ids"]
    embedded = body.embeddings(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        token_type_ids=batch.get("token_type_ids"),
        mask=documents >= 0,
    )
    weights, device = {}, embedded.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        names = ((name, name.rpartition(".")[2], weight) for name, weight in body.encoder.named_parameters())
        weights = {name: weight.to(low) for name, last, weight in names if last in lowered}
    arguments = (embedded, attention.document_mask(documents))
    return functional_call(body.encoder, weights, arguments, {"output_hidden_states": False}).last_hidden_state


def blocks(model: PreTrainedModel) -> Sequence[torch.nn.Module]:
    """The encoder's layers."""
    return list(model.base_model.encoder.layer)


def tensor_partition(heads: int, intermediate_size: int) -> TensorPartition:
    """How processes share the layers: heads and the middle of the feed-forward."""
    return TensorPartition(
        sizes={"num_attention_heads": heads, "intermediate_size": intermediate_size},
        entries=("attention.self", "intermediate"),
        columns={**{f"attention.self.{name}": 1 for name in ("query", "key", "value")}, "intermediate.dense": 1},
        rows=("attention.output.dense", "output.dense"),
        counts={"attention.self": ("num_attention_heads", "all_head_size")},
    )


def share_embeddings(owner: PreTrainedModel, other: PreTrainedModel) -> None:
    """Makes `other` use the whole embedding module of `owner`: words, positions, token types, norm.

    Raises:
        UserError: the two modules do not have the same tensors; says which.
    """
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
