"""Counts the bytes of live tensors, by their purpose, while code runs on tensors without data."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from terakoya.checking.fake_tensors import KnownValues, tensors_in
from terakoya.toolkit.attributes import replace_attribute
from terakoya_planning import flash_scratch

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS, BATCH = "activations", "logits", "batch"
HOST = "on the host"
CAST_WEIGHTS = "weights in 16 bits"
"""Copies of weights that autocast makes."""
SCRATCH = "scratch of flash attention"
"""What the kernel itself allocates while it runs."""


class MemoryTracker(KnownValues):
    """While active, counts, too, the storages of all tensors that operations return, from the first to the last use.

    A new storage belongs to the part `others`, or to the logits if its tensor's last dimension is the vocabulary;
    `assign` overrides that.

    Attributes:
        live: bytes by part, at this moment.
        peaks: window that `enter` began -> bytes by part at its peak, without those on the host.
        most_on_host: the most bytes there.
    """

    def __init__(self, fake: FakeTensorMode, vocabulary_size: int) -> None:
        super().__init__(fake)
        self.vocabulary_size = vocabulary_size
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, dict[str, int]] = {}
        self.most_on_host = 0
        self.others = ACTIVATIONS
        self._window = ""
        self._peak_bytes = -1
        self._storages: dict[int, tuple[weakref.ref[Any], int, str]] = {}  # address -> reference, bytes, part
        self._cast: set[int] = set()  # addresses of storages of which copies belong to `CAST_WEIGHTS`

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func` and counts new storages in its result."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_cast = func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._cast
        for each in tensors_in(result):
            self._count(each, CAST_WEIGHTS if is_cast else None)
        if func.name() == flash_scratch.OPERATION:
            _, query, key, _, _, _, cu_seqlens = args[:7]
            self._count_while_running(flash_scratch.backward_scratch(query, key, cu_seqlens))
        return result

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
