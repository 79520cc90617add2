"""Following the bytes of live tensors, by what they are for, while something runs on tensors without data."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, BATCH = "activations", "logits", "batch"

REMEMBERED = 1 << 20
"""Elements of the largest tensor whose numbers are kept."""


class MemoryTracker(TorchDispatchMode):
    """While active, counts the storages of all tensors that operations return, from the first to the last use.

    A new storage belongs to `others`, or to the logits if its tensor's last dimension is the vocabulary; `belongs` says
    better.

    What is computed from the batch alone is computed with its numbers too (`knows`), so that where documents begin can
    be asked. Other questions about numbers, which tensors without data cannot answer, are answered with 1 or True: the
    norm of a gradient is finite.

    Attributes:
        live: bytes by part, now.
        peaks: for each window that `enter` began: bytes by part when most were live.
    """

    def __init__(self, fake: FakeTensorMode, vocabulary_size: int) -> None:
        super().__init__()
        self.fake = fake
        self.vocabulary_size = vocabulary_size
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, dict[str, int]] = {}
        self.others = ACTIVATIONS
        self._window = ""
        self._most = -1
        self._known: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # by the storage's address
        self._numbers = WeakIdKeyDictionary()  # a tensor without data -> the same with data

    def enter(self, window: str, *, others: str = ACTIVATIONS) -> None:
        """Begins the window `window`, from now on looking for its peak."""
        self._window, self.others = window, others
        self._most = -1
        self._look()

    def belongs(self, tensors: Iterable[Tensor], part: str) -> None:
        """Says that the storages of `tensors` belong to `part`."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._see(tensor, part)
                continue
            reference, size, before = self._known[storage._cdata]
            self._known[storage._cdata] = (reference, size, part)
            self.live[before] -= size
            self.live[part] += size

    def knows(self, tensor: Tensor, numbers: Tensor) -> None:
        """Says which `numbers` the tensor without data stands for."""
        self._numbers[tensor] = numbers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func` and counts what is new in what it returns."""
        given = dict(kwargs or {})
        inputs = [each for each in (*args, *given.values()) if isinstance(each, Tensor)]
        known = bool(inputs) and all(each in self._numbers for each in inputs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._with_numbers(func, args, given) if known else _one(args[0].dtype)
        try:
            result = func(*args, **given)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if not known:
                raise
            result = self.fake.from_tensor(self._with_numbers(func, args, given))
        returned = [each for each in _listed(result) if isinstance(each, Tensor)]
        if known and sum(each.numel() for each in returned) <= REMEMBERED:
            numbers = _listed(self._with_numbers(func, args, given))
            for each, real in zip(_listed(result), numbers, strict=True):
                if isinstance(each, Tensor) and each not in self._numbers:
                    self._numbers[each] = real
        for each in returned:
            self._see(each)
        return result

    def _with_numbers(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `func` returns of tensors whose numbers are known."""
        real_args, real_kwargs = tree_map_only(Tensor, lambda each: self._numbers[each], (args, dict(kwargs)))
        with unset_fake_temporarily():
            return func(*real_args, **real_kwargs)

    def _see(self, tensor: Tensor, part: str | None = None) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        if part is None:
            is_logits = self.others == ACTIVATIONS and tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary_size
            part = LOGITS if is_logits else self.others
        size = storage.nbytes()
        self._known[address] = (weakref.ref(storage, lambda _: self._forget(address)), size, part)
        self.live[part] += size
        self._look()

    def _forget(self, address: int) -> None:
        _, size, part = self._known.pop(address)
        self.live[part] -= size

    def _look(self) -> None:
        total = self.live.total()
        if total > self._most:
            self._most = total
            self.peaks[self._window] = dict(self.live)


def _listed(result: Any) -> list[Any]:
    """What an operation returns, as a list."""
    return list(result) if isinstance(result, tuple | list) else [result]


def _one(dtype: torch.dtype) -> bool | int | float:
    """A scalar of `dtype` that is true, positive and finite."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
