"""What makes a folder's model fit a run that begins with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.components.architecture import Architecture
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StartModel:
    """A folder's model, and that of the run.

    Attributes:
        source: the folder's, in float32 on the CPU, with its own config.
        folder: where it was read.
        target: the run's, which stays as it is.
        architectures: those of the run's models.
        settings: `start_from`, a `config.start_from.StartFrom`.
        vocabulary, tokenizer_folder: those of the stores.
        seed: that of the run.
    """

    source: PreTrainedModel
    folder: Path
    target: PreTrainedModel
    architectures: Sequence[Architecture]
    settings: Any
    vocabulary: Vocabulary
    tokenizer_folder: Path
    seed: int
