"""Counts the bytes of live tensors, by their purpose, while code runs on tensors without data."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
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

from terakoya.estimation import flash_scratch
from terakoya.toolkit.attributes import replace_attribute

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, BATCH = "activations", "logits", "batch"
HOST = "on the host"
CAST_WEIGHTS = "weights in 16 bits"
"""Copies of weights that autocast makes."""
SCRATCH = "scratch of flash attention"
"""What the kernel itself allocates while it runs."""

REMEMBERED = 1 << 20
"""Elements of the largest tensor whose values are kept."""


class MemoryTracker(TorchDispatchMode):
    """While active, counts the storages of all tensors that operations return, from the first to the last use.

    A new storage belongs to the part `others`, or to the logits if its tensor's last dimension is the vocabulary;
    `assign` overrides that.

    Operations on the batch alone also run with real values (`take`), so that code can ask where documents begin.
    Other questions about values, which tensors without data cannot answer, are answered with 1 or True: the norm of a
    gradient, for example, is finite.

    Attributes:
        live: bytes by part, at this moment.
        peaks: window that `enter` began -> bytes by part at its peak, without those on the host.
        most_on_host: the most bytes there.
    """

    def __init__(self, fake: FakeTensorMode, vocabulary_size: int) -> None:
        super().__init__()
        self.fake = fake
        self.vocabulary_size = vocabulary_size
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, dict[str, int]] = {}
        self.most_on_host = 0
        self.others = ACTIVATIONS
        self._window = ""
        self._peak_bytes = -1
        self._storages: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # address -> reference, bytes, part
        self._cast: set[int] = set()  # addresses of storages of which copies belong to `CAST_WEIGHTS`
        self._values = WeakIdKeyDictionary()  # a tensor without data -> the same tensor with data

    def enter(self, window: str, *, others: str = ACTIVATIONS) -> None:
        """Begins the window `window`: from now on its peak is recorded, and new storages belong to `others`."""
        self._window, self.others = window, others
        self._peak_bytes = -1
        self._update_peak()

    def on_host(self) -> AbstractContextManager[None]:
        """While open, new storages are memory of the host."""
        return replace_attribute(self, "others", HOST)

    def assign(self, tensors: Iterable[Tensor], part: str) -> None:
        """Assigns the storages of `tensors` to `part`."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._count(tensor, part)
                continue
            reference, size, before = self._storages[storage._cdata]
            self._storages[storage._cdata] = (reference, size, part)
            self.live[before] -= size
            self.live[part] += size

    def expect_casts(self, weights: Iterable[Tensor]) -> None:
        """Assigns copies of `weights` in another dtype, when they are made, to `CAST_WEIGHTS`."""
        self._cast.update(each.untyped_storage()._cdata for each in weights)

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors without data, of which those by the same names in `tensors` are the real values."""
        taken: dict[str, Tensor] = {name: self.fake.from_tensor(tensor) for name, tensor in tensors.items()}
        for name, tensor in taken.items():
            self._values[tensor] = tensors[name]
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func` and counts new storages in its result."""
        named = dict(kwargs or {})
        inputs = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        known = bool(inputs) and all(each in self._values for each in inputs)
        is_question = func is torch.ops.aten._local_scalar_dense.default
        if is_question and known:
            return self._run_with_values(func, args, named)
        try:
            result = func(*args, **named)  # a constant such as torch.tensor(3) keeps its value
        except (DynamicOutputShapeException, DataDependentOutputException):
            if is_question:
                return _one(args[0].dtype)
            if not known:
                raise
            result = self.fake.from_tensor(self._run_with_values(func, args, named))
        returned = [each for each in _as_list(result) if isinstance(each, Tensor)]
        if known and sum(each.numel() for each in returned) <= REMEMBERED:
            values = _as_list(self._run_with_values(func, args, named))
            for each, real in zip(_as_list(result), values, strict=True):
                if isinstance(each, Tensor) and each not in self._values:
                    self._values[each] = real
        is_cast = func is torch.ops.aten._to_copy.default and inputs[0].untyped_storage()._cdata in self._cast
        for each in returned:
            self._count(each, CAST_WEIGHTS if is_cast else None)
        if func.name() == flash_scratch.OPERATION:
            _, query, key, _, _, _, cu_seqlens = args[:7]
            self._count_while_running(flash_scratch.backward_scratch(query, key, cu_seqlens))
        return result

    def _run_with_values(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs `func` on the real values of its arguments."""
        real_args, real_kwargs = tree_map_only(Tensor, lambda each: self._values[each], (args, dict(kwargs)))
        with unset_fake_temporarily():
            return func(*real_args, **real_kwargs)

    def _count(self, tensor: Tensor, part: str | None = None) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages:
            return
        if part is None:
            is_logits = self.others == ACTIVATIONS and tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary_size
            part = LOGITS if is_logits else self.others
        size = storage.nbytes()
        self._storages[address] = (weakref.ref(storage, lambda _: self._forget(address)), size, part)
        self.live[part] += size
        self._update_peak()

    def _count_while_running(self, scratch: int) -> None:
        """Counts `scratch` bytes that the operation which has just returned allocated and freed."""
        self.live[SCRATCH] += scratch
        self._update_peak()
        self.live[SCRATCH] -= scratch

    def _forget(self, address: int) -> None:
        _, size, part = self._storages.pop(address)
        self.live[part] -= size

    def _update_peak(self) -> None:
        self.most_on_host = max(self.most_on_host, self.live[HOST])
        total = self.live.total() - self.live[HOST]
        if total > self._peak_bytes:
            self._peak_bytes = total
            self.peaks[self._window] = {part: size for part, size in self.live.items() if part != HOST}


def _as_list(result: Any) -> list[Any]:
    """The results of an operation as a list."""
    return list(result) if isinstance(result, tuple | list) else [result]


def _one(dtype: torch.dtype) -> bool | int | float:
    """A scalar of `dtype` that is true, positive and finite."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
