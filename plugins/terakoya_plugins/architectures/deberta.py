"""DeBERTa (He et al., 2021, arXiv:2006.03654): attention that keeps content and relative position apart.

It has no enhanced mask decoder, with which the original adds absolute positions before the last layers in pre-training:
Transformers has no such layers and could not load a model trained with them.
"""

from __future__ import annotations

from typing import ClassVar

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.disentangled import DisentangledEncoder


class Deberta(DisentangledEncoder):
    """Fields have the names of Transformers' `DebertaConfig`; defaults are DeBERTa-base's."""

    config_class = "DebertaConfig"
    bf16_stream = True
    model_classes: ClassVar = {"masked": "DebertaForMaskedLM", "body": "DebertaModel"}

    max_relative_positions: int = -1
    """Number of distinct distances in each direction; -1: as many as `max_position_embeddings`."""


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"deberta": Deberta}
