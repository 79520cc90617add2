"""Replaced-token detection: a generator fills in masked tokens, a discriminator detects which tokens are replaced.

Clark et al., 2020 (ELECTRA, arXiv:2003.10555). Of the predicted tokens 85 % are replaced by [MASK] and 15 % stay, as in
the original's code. The vocabulary head runs at the predicted positions only; a sample equal to the original token
counts as original; no gradient flows through samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from terakoya import hookimpl
from terakoya.components import Architecture, Batch, LossTerm, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.changing_rates import Rate, largest_rate, rate_at
from terakoya.toolkit.masking import mask_rows
from terakoya.toolkit.objectives.nested_architecture import NestedArchitecture
from terakoya.toolkit.random_keys import numbers, streams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
DEFAULT_SIZE = "1/4"


class ReplacedToken(Objective):
    """Settings of replaced-token detection. The run's architecture is that of the discriminator."""

    phase_settings = frozenset({
        "mlm_probability", "whole_word_mask", "budgeted", "replace_probability", "random_probability"
    })  # fmt: skip
    test_settings: ClassVar[Mapping[str, Any]] = {"generator_size": "1/2"}

    layout: Literal["packed", "stream", "lines"] = "packed"
    """The row layout; generator and discriminator use the same rows."""
    mlm_probability: Rate = 0.15
    """The share of tokens that the generator predicts, between 0 and 1; or how it changes along the run, such as
    `{"start": 0.3, "end": 0.15}`, of which validation uses `end`."""
    whole_word_mask: bool = True
    """Whether all tokens of a word are predicted together."""
    budgeted: bool = True
    """Whether words are chosen so that nearly `mlm_probability` of each row is predicted, instead of independently.
    Every word is predicted with that probability either way."""
    replace_probability: Probability = 0.85
    """Of the predicted tokens, the share that [MASK] replaces in the generator's input."""
    random_probability: Probability = 0.0
    """Of the predicted tokens, the share that a random token replaces; the rest stays as it is."""
    generator: NestedArchitecture | None = None
    """The generator's complete architecture; excludes `generator_size`."""
    generator_size: str | None = None
    """The generator's width as a fraction of the discriminator's: hidden size, heads and feed-forward size, not depth.
    1/4 without `generator` and `generator_size`."""
    sharing: Literal["tied", "none", "disentangled"] = "tied"
    """`tied`: one embedding module for both, as in the original. `none`: one each. `disentangled`: the discriminator
    adds a difference to the generator's word embeddings and does not change those (DeBERTaV3)."""
    temperature: PositiveFloat = 1.0
    """The generator's logits are divided by it before tokens are sampled."""
    generator_weight: NonNegativeFloat = 1.0
    """The weight of the generator's loss, a mean over predicted tokens."""
    discriminator_weight: NonNegativeFloat = 50.0
    """The weight of the discriminator's loss, a mean over all tokens except padding."""

    @field_validator("generator_size")
    @classmethod
    def _is_fraction(cls, value: str | None) -> str | None:
        try:
            positive = value is None or 0 < Fraction(value) <= 1
        except (ValueError, ZeroDivisionError):
            positive = False
        if not positive:
            raise ValueError(f'expected a fraction like "1/4", at most 1, got "{value}"')
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.replace_probability + self.random_probability > 1.0:
            raise ValueError("replace_probability and random_probability add up to more than 1")
        if self.generator is not None and self.generator_size is not None:
            raise ValueError("generator and generator_size exclude each other; set one of them to null")
        return self

    def row_layout(self) -> Layout:
        return Layout(kind=self.layout)

    def terms(self) -> Mapping[str, LossTerm]:
        from terakoya_plugins.objectives.replaced_token.module import BINS

        return {
            "generator_loss": LossTerm("masked", self.generator_weight, bits="masked_bits"),
            "generator_accuracy": LossTerm("masked"),
            "sampled_accuracy": LossTerm("masked"),
            "discriminator_loss": LossTerm("tokens", self.discriminator_weight),
            "discriminator_scores": LossTerm("tokens", bins=2 * BINS),
        }

    def derive_metrics(self, sums: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Mapping[str, float]:
        from terakoya_plugins.objectives.replaced_token.module import discriminator_metrics

        scores = sums.get("discriminator_scores")
        return {} if scores is None else discriminator_metrics(scores, centre=self._centre())

    def architectures(self, architecture: Architecture) -> Sequence[Architecture]:
        return [architecture, self._generator(architecture)]

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """Masks `rows` (B, T) by their keys.

        Adds `masked_positions` (K,), indices into the flattened rows, `masked_labels` (K,), -100 in unused slots, and
        `sample_uniforms` (K,) float64, the uniform random numbers that sample the generator's tokens. Counts: masked,
        tokens.
        """
        masked, batch = mask_rows(
            rows,
            vocabulary,
            objective="replaced_token",
            probability=self.mlm_probability,
            whole_words=self.whole_word_mask,
            budgeted=self.budgeted,
            replace=(self.replace_probability, self.random_probability),
        )
        row, column = np.divmod(masked.positions, rows.tokens.shape[1])
        drawn = numbers(streams(rows.keys, "sample")[row], column)
        arrays = {**batch.arrays, "sample_uniforms": (drawn >> np.uint64(12)) * 2.0**-52}
        return Batch(arrays, batch.counts)

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        from terakoya.toolkit.architectures.encoder import share_embeddings
        from terakoya_plugins.objectives.replaced_token import module

        small = self._generator(architecture)
        for role, each, head in (("generator", small, "masked"), ("discriminator", architecture, "discriminator")):
            if head not in each.heads:
                raise UserError(
                    f"objective replaced_token: architecture {type(each).__name__} cannot be the {role}: it has no "
                    f"head {head!r}, only {sorted(each.heads)}"
                )
        if self.layout == "packed" and small.document_masking == "none":
            raise UserError(
                f"objective.generator: architecture {type(small).__name__} cannot keep documents in one row apart; "
                'use objective.layout "stream" or "lines"'
            )
        longest = architecture.max_sequence_length(), small.max_sequence_length()
        if longest[1] is not None and (longest[0] is None or longest[0] > longest[1]):
            raise UserError(
                f"objective.generator: accepts rows of at most {longest[1]} tokens, the discriminator "
                f"{longest[0] or 'any length'}; give both the same maximum"
            )
        generator, discriminator = small.build(vocabulary, "masked"), architecture.build(vocabulary, "discriminator")
        try:
            if self.sharing == "tied":
                share_embeddings(generator, discriminator)
            elif self.sharing == "disentangled":
                module.disentangle(generator, discriminator)
        except UserError as error:
            raise UserError(
                f"objective.sharing: {error}; give both the same embedding size, or set objective.sharing to none"
            ) from None
        return module.ReplacedTokenModule(
            small, generator, architecture, discriminator, temperature=self.temperature, centre=self._centre()
        )

    def _centre(self) -> float:
        """The score of a discriminator that knows only the share of masked tokens at the end of the run."""
        share = rate_at(self.mlm_probability, 1.0)
        return math.log(share / (1.0 - share))

    def _generator(self, architecture: Architecture) -> Architecture:
        if self.generator is not None:
            return self.generator
        try:
            return architecture.scale_width(Fraction(self.generator_size or DEFAULT_SIZE))
        except UserError as error:
            raise UserError(f"objective.generator_size: {error}") from None

    def exports(self, module: torch.nn.Module) -> Mapping[str, PreTrainedModel]:
        from terakoya_plugins.objectives.replaced_token.module import with_plain_embeddings

        return {"generator": module.generator, "discriminator": with_plain_embeddings(module.discriminator)}

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """FLOPs of both models; the generator's head runs at the predicted positions only."""
        parts: Any = module
        small: Architecture = parts.generator_architecture
        generator = small.flops_per_token(
            parts.generator, context=context, head_share=largest_rate(self.mlm_probability)
        )
        return generator + architecture.flops_per_token(parts.discriminator, context=context)

    def load_models(self, module: torch.nn.Module, models: Mapping[str, PreTrainedModel]) -> None:
        """Copies both models' weights; with `disentangled` the difference is that of their word embeddings."""
        if self.sharing != "disentangled":
            super().load_models(module, models)
            return
        from terakoya.components.copy_weights import copy_weights
        from terakoya_plugins.objectives.replaced_token.module import disentangle

        disentangle(models["generator"], models["discriminator"], learnt=True)
        parts = {"generator": module.generator, "discriminator": module.discriminator}
        copy_weights(module, parts, models)


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    return {"replaced_token": ReplacedToken}
