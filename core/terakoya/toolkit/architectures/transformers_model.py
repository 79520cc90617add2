"""Model families that Transformers has: their config and their models, by the names of its classes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from pydantic import model_validator

from terakoya.components import Architecture, Head, Vocabulary
from terakoya.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class TransformersArchitecture(Architecture):
    """The base of `EncoderArchitecture`, `DecoderArchitecture`, `EncoderDecoderArchitecture`, and of any other family
    that Transformers has. Fields are keyword arguments of the config class.

    Classes are named, not imported: listing architectures imports neither torch nor Transformers.
    """

    config_class: ClassVar[str] = ""
    """The family's config class in Transformers: "BertConfig"."""
    config_ids: ClassVar[Mapping[str, str]] = {"pad_token_id": "pad"}
    """Special ids of the config -> the attribute of `Vocabulary` that holds each."""
    undeclared_arguments: ClassVar[frozenset[str]] = frozenset()
    """Arguments that the config class reads although it declares no attributes of their names. Of all others
    `terakoya plugins check` asks that it has them, since Transformers accepts and ignores any name."""
    model_classes: ClassVar[Mapping[str, str]] = {}
    """Head -> the model class in Transformers that has it: {"masked": "BertForMaskedLM"}. Its keys are the `heads`."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        width, heads = getattr(self, "hidden_size", None), getattr(self, "num_attention_heads", None)
        if width and heads and width % heads:
            raise ValueError(
                f"num_attention_heads: expected a divisor of hidden_size {width}, got {heads}"
                f"{nearest_divisors(width, heads)}"
            )
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **further: Any) -> None:
        super().__pydantic_init_subclass__(**further)
        if "phase_settings" not in vars(cls):
            cls.phase_settings = frozenset(
                name for name in cls.model_fields if name.endswith(("rope_theta", "local_attention"))
            )
        if "model_classes" in vars(cls):
            cls.heads = frozenset(cast("Mapping[Head, str]", cls.model_classes))

    def config(self, vocabulary: Vocabulary) -> PretrainedConfig:
        """Returns a `config_class` of the `config_arguments`."""
        if not self.config_class:
            raise UserError(f"architecture {type(self).__name__}: has no config_class; name it, or write `config`")
        return self._find_class("config_class", self.config_class)(**self.config_arguments(vocabulary))

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields, the vocabulary's size and the `config_ids`."""
        ids = {name: getattr(vocabulary, token) for name, token in self.config_ids.items()}
        return {**self.model_dump(mode="json"), "vocab_size": vocabulary.size, **ids}

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns a randomly initialised model of the class that `model_classes` names for `head`."""
        return self._find_class("model_classes", self.model_classes[head])(self.config(vocabulary))

    def _find_class(self, attribute: str, name: str) -> Any:
        """Returns the class `name` of Transformers, which `attribute` names. Raises UserError if there is none."""
        import transformers

        try:
            return getattr(transformers, name)
        except AttributeError:
            near = difflib.get_close_matches(name, dir(transformers), n=2)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UserError(
                f"architecture {type(self).__name__}: {attribute}: Transformers {transformers.__version__} has no "
                f"class {name}{meant}"
            ) from None

    def max_sequence_length(self) -> int | None:
        """Returns the field `max_position_embeddings`, None if the family has none."""
        return getattr(self, "max_position_embeddings", None)


def nearest_divisors(number: int, wanted: int) -> str:
    """Returns the divisors of `number` nearest to `wanted`, as the end of a sentence: `; the nearest: 2 and 4`.

    Returns "" where there is none."""
    divisors = [each for each in range(1, min(number, 1 << 16) + 1) if number % each == 0]
    near = sorted(sorted(divisors, key=lambda each: abs(each - wanted))[:2])
    return f"; the nearest: {' and '.join(map(str, near))}" if near else ""
