"""The parts of a root module: its weights by name, as checkpoints hold them, its models, and their architectures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from terakoya.components import Architecture
from terakoya.components.flops import PACKED
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError

ADAPTED = "adapted"
"""The attribute of a root module whose own weights stay as they are in their folder: only what is beside them is
trained."""


def saved_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the part of `named_values` that a checkpoint holds: all, or what is trained if `module` is `ADAPTED`."""
    adapted = getattr(module, ADAPTED, False)
    for name, value in named_values(module):
        if value.requires_grad or not adapted:
            yield name, value


def named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of each parameter (tied ones once) and each persistent buffer of `module`."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def count_weights(module: nn.Module) -> int:
    """The elements of all parameters of `module`, and of its packed matrices."""
    packed = sum(getattr(each, PACKED, 0) for each in module.modules())
    return packed + sum(each.numel() for each in module.parameters())


def top_level_models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yields each Transformers model in `module` that is not part of another."""
    outer_names: list[str] = []
    for name, child in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in outer_names)
        if isinstance(child, PreTrainedModel) and not inside:
            outer_names.append(name)
            yield child


def input_axis(owner: nn.Module, value: Tensor) -> int | None:
    """Returns the dimension of `value`, a parameter of `owner`, that is summed over inputs; None where there is none,
    as in embeddings, norms and biases."""
    if value.ndim != 2 or not isinstance(owner, nn.Linear | Conv1D):
        return None
    return 0 if isinstance(owner, Conv1D) else 1


def norm_before_tied_head(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> nn.Module | None:
    """Returns the last norm of `model` outside its `blocks`, where its head is tied to its embeddings; None where the
    head is not, or there is no such norm."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "weight", head) is not getattr(embedding, "weight", None):
        return None
    inside = {each for block in blocks for each in block.modules()}
    norms = [each for each in model.modules() if "norm" in type(each).__name__.lower() and each not in inside]
    return norms[-1] if norms else None


def has_learned_positions(module: nn.Module) -> bool:
    """Whether `module` learns a vector for each position, by the names that Transformers gives such embeddings."""
    return any(
        isinstance(each, nn.Embedding) and name.rpartition(".")[2] in ("position_embeddings", "wpe", "embed_positions")
        for name, each in module.named_modules()
    )


def architecture_of(
    model: PreTrainedModel, architectures: Sequence[Architecture], vocabulary: Vocabulary, *, key: str
) -> Architecture:
    """The one of `architectures` that builds models of the type of `model`. Raises UserError if none of them does;
    `key` is the setting that needs to know the layers."""
    for architecture in architectures:
        if isinstance(model.config, type(architecture.config(vocabulary))):
            return architecture
    raise UserError(f"{key}: no architecture of the parameters defines the layers of {type(model)}")
