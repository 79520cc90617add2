"""A run begins with the randomly initialised weights of another recipe, where names and shapes agree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.components import ModuleBuild, ModuleTransform

if TYPE_CHECKING:
    from torch import nn

VARIABLE = "TERAKOYA_SHARED_START"
"""Names the parameter file of the other recipe; runs that begin or go on while it is set share its start."""


@contextmanager
def sharing_start(file: Path) -> Iterator[None]:
    """While the block runs, runs begin with the weights of the parameters in `file`, at their own seed."""
    os.environ[VARIABLE] = str(file)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def copy_start(module: nn.Module, build: ModuleBuild) -> None:
    """Gives `module` the weights of the other recipe that have the names and shapes of its own. Raises UserError where
    that recipe cannot be built."""
    import torch

    from terakoya.config.parameters import Parameters
    from terakoya.training.model.build import build_module

    theirs = Parameters.load(Path(os.environ[VARIABLE]), [f"seed={build.parameters.seed}"])
    others = dict(build_module(theirs, build.vocabulary).named_parameters())
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name in others and others[name].shape == weight.shape:
                weight.copy_(others[name])


TRANSFORM = ModuleTransform("freeze", lambda parameters: VARIABLE in os.environ, copy_start)
