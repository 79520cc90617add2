"""Weights by name, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

ADAPTED = "adapted"
"""The attribute of a root module whose own weights lie in a folder and stay so: adapters are trained over them."""


def saved_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of `named_values` what a checkpoint holds: all, or, of a module that is `ADAPTED`, what is trained."""
    adapted = getattr(module, ADAPTED, False)
    for name, value in named_values(module):
        if value.requires_grad or not adapted:
            yield name, value


def named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each parameter (tied ones once) and each persistent buffer of `module`."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer
