"""`lora`: adapters, small matrices trained in addition to a model's own. The settings have peft's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from terakoya.config.settings import Settings
from terakoya.config.start_from import StartFrom
from terakoya.json_settings import short_json

Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]

FOLDER = "adapter"
"""Name of the folder with adapters in peft's own format."""

CHANGEABLE = frozenset({"lora.lora_alpha", "lora.lora_dropout", "lora.use_rslora"})
"""Keys that a resumed run may change with --allow-change; all others decide which tensors there are."""


class LoraSettings(Settings):
    """Adapters that are trained instead of the weights (Hu et al., 2021, arXiv:2106.09685)."""

    r: PositiveInt = 16
    """The rank: an adapter of a matrix (O, I) is a product of (O, r) and (r, I)."""
    lora_alpha: PositiveInt = 32
    """An adapter is multiplied by lora_alpha / r; with `use_rslora` by lora_alpha / sqrt(r)."""
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The dropout probability of an adapter's inputs."""
    target_modules: Literal["all-linear"] | Names | None = None
    """The ends of the names of the linear layers that get adapters; "all-linear" is all but the vocabulary head; null
    is peft's default for models of this type."""
    modules_to_save: Names | None = None
    """The ends of the names of modules that are trained whole, such as a new head."""
    use_rslora: bool = False
    """Whether adapters are multiplied by lora_alpha / sqrt(r) instead of lora_alpha / r."""
    init_lora_weights: Literal[True, "gaussian"] = True
    """How the first matrix is initialised: as torch initialises a linear layer (true), or from a normal distribution
    ("gaussian"). The second is zero, so that training begins with the unchanged model."""
    quantization: Literal["int8", "nf4"] | None = None
    """How the frozen weights of linear layers are kept: in 8 bits ("int8"), in 4 ("nf4", as QLoRA), or as they are
    (null). The model that is trained and exported is that of the rounded weights."""


def check_lora(lora: LoraSettings | None, *, start_from: StartFrom | None, frozen_layers: int) -> None:
    """Raises ValueError where other parameters conflict with `lora`."""
    if lora is None:
        return
    if start_from is None:
        raise ValueError(
            "lora: adapters adapt a trained model, and randomly initialised weights would stay as they are; "
            "name a Transformers folder in start_from, or set lora to null"
        )
    if start_from.vocabulary is not None:
        raise ValueError(
            f'start_from.vocabulary: "{start_from.vocabulary}" makes new embeddings, which lora would never train; '
            "train the whole model, export it, and start with lora from there"
        )
    if start_from.grow is not None:
        raise ValueError(
            f"start_from.grow: {short_json(start_from.grow)} makes a larger model, and adapters are exported for that "
            "of the folder; train the whole model, export it, and start with lora from there"
        )
    if frozen_layers >= 0:
        raise ValueError(
            f"frozen_layers: with lora every weight of the model is frozen, got {frozen_layers}; set it to -1, and "
            "choose the layers that get adapters with lora.target_modules"
        )


def untrained_problem(lora: LoraSettings, names: Sequence[str]) -> str | None:
    """Returns what is wrong with randomly initialised weights of these `names`; None where `lora` trains them."""
    whole = lora.modules_to_save or ()
    modules = {name: name.rpartition(".")[0] for name in names}
    untrained = [name for name in names if not any(f".{each}." in f".{modules[name]}." for each in whole)]
    if not untrained:
        return None
    from terakoya.components.copy_weights import join_names  # torch

    return (
        f"has no {join_names(untrained)}, which would be randomly initialised and, with lora, never trained; name "
        "their modules in lora.modules_to_save, or train the whole model"
    )
