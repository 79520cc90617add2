"""Functions as operations of torch's dispatcher, which its compiler and tensors without data see as one step each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "terakoya"
DEVICES = ("CPU", "CUDA")
is_traced = torch.compiler.is_compiling
"""Whether torch.compile is looking at what runs."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def operation(without_data: Callable[..., Any], *, changes: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function the operation `terakoya::NAME`, which writes to its arguments named in `changes`.

    `without_data` returns what it returns, for tensors without data. The operation has no gradient; functions of
    autograd call it. It takes the host half the time of one by `torch.library.custom_op`, whose decorators would also
    import the compiler into every run.
    """

    def define(function: Callable[..., Any]) -> Any:
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=changes))
        for device in DEVICES:
            _LIBRARY.impl(name, function, device)
        _LIBRARY.impl(name, without_data, "Meta")
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define
