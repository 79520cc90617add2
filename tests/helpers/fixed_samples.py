"""A plugin whose generator's tokens no rounding can change: loaded with `--plugin` by the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from terakoya import hookimpl
from terakoya.components import Architecture, Objective
from terakoya.components.vocabulary import Vocabulary
from terakoya_plugins.objectives.replaced_token import ReplacedToken


class FixedSamples(ReplacedToken):
    """Replaced-token detection with samples from the rows' keys alone; every third is the right token."""

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        module: Any = super().build(architecture, vocabulary)

        def sample(odds: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
            drawn = 6 + (batch["sample_uniforms"] * (vocabulary.size - 6)).long()
            return torch.where(drawn % 3 == 0, batch["masked_labels"].clamp(min=0), drawn)

        module.sample = sample
        return module


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    return {"fixed_samples": FixedSamples}
