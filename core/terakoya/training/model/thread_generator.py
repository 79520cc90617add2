"""Random numbers of one thread, which leave torch's own generators to all others.

A module that is built in the background draws initial values. Training draws dropout at the same time, and must draw
the same numbers whether or not anything runs beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ThreadGenerator(TorchDispatchMode):
    """While open, everything random that this thread computes on the host draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the operation `function`, if it is random with the generator."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in function.tags:
            if all(argument.name != "generator" for argument in function._schema.arguments):
                form = function._overloadname  # `torch.randn` has a second form with a generator
                function = getattr(function.overloadpacket, "generator" if form == "default" else f"{form}_generator")
            kwargs["generator"] = self.generator
        return function(*args, **kwargs)
