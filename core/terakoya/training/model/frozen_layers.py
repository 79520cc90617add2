"""`frozen_layers`: embeddings and the lowest layers keep their weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.model.module_parts import architecture_of, top_level_models


def freeze(parameters: Parameters, module: nn.Module, vocabulary: Vocabulary) -> None:
    """Takes embeddings and the lowest `frozen_layers` layers of every model in `module` out of training; -1: nothing.

    Embeddings are all that a body has before its layers: words, positions, norm, a projection. A vocabulary head that
    shares the words' matrix is frozen with it, its bias is not. Gradients still pass through where they must, and
    dropout stays on.

    Raises:
        UserError: more layers than a model has, or nothing would be left to train.
    """
    count = parameters.frozen_layers
    if count < 0:
        return
    for model in top_level_models(module):
        blocks = list(architecture_of(parameters, model, vocabulary, key="frozen_layers").blocks(model))
        if count > len(blocks):
            raise UserError(
                f"frozen_layers: expected at most {len(blocks)}, as many layers as {type(model).__name__} has, "
                f"got {count}"
            )
        for part in [*_embeddings(model, blocks), *blocks[:count]]:
            part.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"frozen_layers: {count} leaves nothing to train")


def parameter_summary(parameters: Parameters, module: nn.Module) -> str:
    """How many parameters `module` has and, where some are frozen, how many are trained."""
    frozen_layers, lora = parameters.frozen_layers, parameters.lora
    count = sum(parameter.numel() for parameter in module.parameters())
    if frozen_layers < 0 and lora is None:
        return f"{count / 1e6:.1f} M parameters"
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if lora is not None:
        whole = f", {', '.join(lora.modules_to_save)} whole" if lora.modules_to_save else ""
        return (
            f"{count - trained:,} parameters, which are frozen, and {trained:,} beside them that are trained "
            f"(LoRA of rank {lora.r}{whole})"
        )
    layers = {0: "", 1: " and the lowest layer"}.get(frozen_layers, f" and the lowest {frozen_layers} layers")
    return f"{count:,} parameters, {trained:,} of them trained (embeddings{layers} frozen)"


def _embeddings(model: PreTrainedModel, blocks: list[nn.Module]) -> Iterator[nn.Module]:
    """The word embeddings, and whatever the body has before the child that its first block lies in."""
    yield model.get_input_embeddings()
    for child in model.base_model.children():
        if blocks and any(each is blocks[0] for each in child.modules()):
            return
        yield child
