"""`lora`: which small matrices are trained beside a model's own, under the names that peft gives its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from terakoya.config.data import Settings
from terakoya.config.start_from import StartFrom

Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]

OF_QUANTIZED = frozenset(
    {"bits", "bnb_4bit_quant_type", "load_in_4bit", "load_in_8bit", "loftq_config", "qlora", "quantization_config"}
)
"""Keys by which other programs ask for frozen weights of fewer bits."""

FOLDER = "adapter"
"""What the folder with adapters in peft's own format is called."""

CHANGEABLE = frozenset({"lora.lora_alpha", "lora.lora_dropout", "lora.use_rslora"})
"""What a run that goes on may change with leave: all else says which tensors there are."""


class LoraSettings(Settings):
    """Adapters that are trained in place of the weights (Hu et al., 2021, arXiv:2106.09685).

    Attributes:
        r: the rank: an adapter of a matrix (O, I) is a product of (O, r) and (r, I).
        lora_alpha: the adapter is multiplied with lora_alpha / r; with `use_rslora` by lora_alpha / sqrt(r).
        lora_dropout: the share of an adapter's inputs that is left out.
        target_modules: the ends of the names of the linear layers that get adapters; "all-linear" is all but the
            vocabulary head; null is what peft gives models of this type.
        modules_to_save: the ends of the names of modules that are trained whole, such as a head that is new.
        use_rslora: see `lora_alpha`.
        init_lora_weights: how the first matrix is drawn, as torch draws a linear layer's or from a normal distribution;
            the second is zero, so that training begins with the model as it is.
    """

    r: PositiveInt = 16
    lora_alpha: PositiveInt = 32
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    target_modules: Literal["all-linear"] | Names | None = None
    modules_to_save: Names | None = None
    use_rslora: bool = False
    init_lora_weights: Literal[True, "gaussian"] = True

    @model_validator(mode="before")
    @classmethod
    def _refuse_quantized(cls, value: Any) -> Any:
        asked = sorted(OF_QUANTIZED & value.keys()) if isinstance(value, Mapping) else []
        if asked:
            raise ValueError(
                f"{asked[0]}: frozen weights stay whole here; adapters over quantized weights (QLoRA) are not supported"
            )
        return value


def check_lora(lora: LoraSettings | None, *, start_from: StartFrom | None, frozen_layers: int, precision: str) -> None:
    """ValueError where other parameters do not go with `lora`."""
    if lora is None:
        return
    if start_from is None:
        raise ValueError(
            "lora: adapters change a model that is trained already, and weights drawn anew would stay as they are; "
            "name a Transformers folder in start_from, or set lora to null"
        )
    if frozen_layers >= 0:
        raise ValueError(
            f"frozen_layers: with lora every weight of the model is frozen, got {frozen_layers}; set it to -1, and say "
            "in lora.target_modules which layers get adapters"
        )
    if precision == "fp8":
        raise ValueError('precision: "fp8" does not go with lora, whose products are small; use "bf16"')


def untrained_weights(lora: LoraSettings | None, names: Sequence[str]) -> list[str]:
    """Those of the weights `names` that `lora` leaves as they are: outside of what it trains whole. Without `lora` none
    are."""
    if lora is None:
        return []
    whole = lora.modules_to_save or ()
    modules = {name: name.rpartition(".")[0] for name in names}
    return [name for name in names if not any(f".{each}." in f".{modules[name]}." for each in whole)]
