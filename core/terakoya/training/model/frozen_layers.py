"""`frozen_layers`: embeddings and the lowest layers keep their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.model.module_parts import architecture_of, count_weights, top_level_models


def freeze(module: nn.Module, architectures: Sequence[Architecture], vocabulary: Vocabulary, *, count: int) -> None:
    """Excludes embeddings and the lowest `count` layers of every model in `module` from training; -1: nothing. Raises
    UserError if `count` is larger than a model's number of layers, or nothing would remain to train.

    Embeddings are everything that a body has before its layers: words, positions, norm, a projection. A vocabulary head
    that shares the word matrix is frozen with it, its bias is not. Gradients still flow through frozen layers where
    needed, and dropout stays active.
    """
    if count < 0:
        return
    for model in top_level_models(module):
        blocks = list(architecture_of(model, architectures, vocabulary, key="frozen_layers").blocks(model))
        if count > len(blocks):
            raise UserError(
                f"frozen_layers: expected at most {len(blocks)}, as many layers as {type(model).__name__} has, "
                f"got {count}"
            )
        for part in [*_embeddings(model, blocks), *blocks[:count]]:
            part.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"frozen_layers: {count} leaves nothing to train")


def parameter_summary(module: nn.Module, parameters: Parameters) -> str:
    """The number of parameters of `module` in words and, where some are frozen, how many are trained."""
    count = count_weights(module)
    frozen_layers, beside = parameters.frozen_layers, parameters.trained_beside
    if frozen_layers < 0 and beside is None:
        return f"{count / 1e6:.1f} M parameters"
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if beside is not None:
        return f"{count - trained:,} frozen parameters and {trained:,} trained ones ({beside})"
    layers = {0: "", 1: " and the lowest layer"}.get(frozen_layers, f" and the lowest {frozen_layers} layers")
    return f"{count:,} parameters, {trained:,} of them trained (embeddings{layers} frozen)"


def _embeddings(model: PreTrainedModel, blocks: list[nn.Module]) -> Iterator[nn.Module]:
    """Yields the word embeddings, and every child of the body before the one that contains the first block."""
    yield model.get_input_embeddings()
    for child in model.base_model.children():
        if blocks and any(each is blocks[0] for each in child.modules()):
            return
        yield child
