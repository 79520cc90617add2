"""The part `mup` of the parameter JSON: the width from which initial values and learning rates are scaled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import PositiveInt

from terakoya import plugins
from terakoya.components import Architecture, Optimizer
from terakoya.config.settings import Settings


class Mup(Settings):
    """Maximal update parametrisation (Yang et al., 2022, Tensor Programs V, arXiv:2203.03466)."""

    base_width: PositiveInt
    """The `hidden_size` at which nothing changes: that of a published recipe, or of the largest model. At another one
    matrices have other initial values and learning rates, so that the same `learning_rate` is about the best. Models
    that are compared have all widths in proportion, and heads of one size."""


def find_problems(mup: Mup | None, *, architectures: Sequence[Architecture], optimizer: Optimizer) -> Iterator[str]:
    """Yields each conflict of `mup` with other settings: where, what was expected, what was given, what to do."""
    if mup is None:
        return
    offers = plugins.registry().components()
    for architecture in architectures:
        if "hidden_size" in architecture.mup_widths:
            continue
        names = [each.name for each in offers if issubclass(each.component, Architecture) and each.component.mup_widths]
        yield (
            f"mup: architecture {type(architecture).__name__} does not say which of its sizes are widths "
            f"(`mup_widths`); {', '.join(sorted(names))} do. Set it to null"
        )
    if not optimizer.supports_mup:
        names = [each.name for each in offers if issubclass(each.component, Optimizer) and each.component.supports_mup]
        yield (
            f"mup: is for optimizers whose updates have the size of the learning rate, as Adam's do, got "
            f"{type(optimizer).__name__}; use {' or '.join(sorted(names))}, or set it to null"
        )
