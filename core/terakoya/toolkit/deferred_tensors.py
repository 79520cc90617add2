"""Tensors whose values are computed when they are asked for, so that a model is built without memory for its weights.

Inside `with DeferredTensors() as deferred` a new floating-point tensor without values (`torch.empty`) is on the meta
device. What is done to it from then on is recorded: drawing its values, with the state of the random generator, scaling
it, copying it, cutting it. `deferred.value` does all this for one tensor, with the bits that it would have had at once.
Tensors that are made with values (`torch.ones`, `torch.arange`: norms, positions, rotary frequencies) are made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
WITHOUT_VALUES = frozenset(
    {
        aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)  # fmt: skip
"""What makes a tensor without values."""
OF_SHAPE = frozenset(
    {
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.rand_like.default,
        aten.randn_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    }
)  # fmt: skip
"""What reads the shape of its first argument only."""
OVERWRITES = frozenset(
    {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.copy_.default}
)
"""What writes every element of its first argument and reads none: what was done to it before no longer matters."""


LIMIT = 1000
"""A tensor that more operations make is no weight that is initialised, but the output of a model, for example."""
META = torch.device("meta")
TRUNCATED = "_no_grad_trunc_normal_"
"""What `torch.nn.init.trunc_normal_` calls; it looks at what it has drawn, and may draw again."""


class CannotDeferError(Exception):
    """Code needs values that are deferred, or does to them what cannot be repeated."""


@dataclass(frozen=True)
class View:
    """Where the elements of a tensor are in its memory: its size, strides and first element."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """The view that `tensor` is."""
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def into(self, memory: Tensor) -> Tensor:
        """Returns this view of `memory`, a tensor that begins with it."""
        return memory.as_strided(self.size, self.stride, self.start)


@dataclass(frozen=True)
class Operation:
    """Something that was done to deferred tensors.

    Attributes:
        args, kwargs: its arguments: a `View` stands for one of the memory that it writes into, and a `Content` with a
            view for any other deferred tensor.
        generator: the random generator's state before it; None where it draws nothing.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generator: Tensor | None = None


@dataclass(frozen=True)
class Content:
    """What is in the memory of deferred tensors at some time, `elements` of `dtype`.

    Attributes:
        result: the operation whose result the memory is, and the number of that result; None: it had no values first.
        written: what has written into it since, in this order.
    """

    dtype: torch.dtype
    elements: int
    result: tuple[Operation, int] | None = None
    written: tuple[Operation, ...] = ()

    @cached_property
    def count(self) -> int:
        """The number of operations that compute it."""
        done = (*self.written, *(self.result[:1] if self.result else ()))
        read = [each for operation in done for each in tree_leaves((operation.args, operation.kwargs))]
        return len(done) + sum(each.content.count for each in read if isinstance(each, Argument))


@dataclass(frozen=True)
class Argument:
    """A deferred tensor as it was when something read it."""

    content: Content
    view: View


@dataclass
class Memory:
    """Memory of deferred tensors. `storage` is here so that no other tensor gets its address."""

    storage: torch.UntypedStorage
    content: Content


class DeferredTensors(TorchDispatchMode):
    """Defers the values of new tensors while it is entered. See the module's docstring. Without `draws` no random
    numbers are drawn: tensors that are drawn have any values."""

    def __init__(self, *, draws: bool = True) -> None:
        super().__init__()
        self.draws = draws
        self.memories: dict[int, Memory] = {}
        self.computes = False
        self.seem_on_cpu = _SeemOnCpu(self)
        self.draw_truncated = getattr(nn.init, TRUNCATED)

    def __enter__(self) -> Self:
        setattr(nn.init, TRUNCATED, self._draw_truncated)
        self.seem_on_cpu.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.seem_on_cpu.__exit__(*raised)
        setattr(nn.init, TRUNCATED, self.draw_truncated)

    def _draw_truncated(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Draws from a truncated normal distribution, as one operation."""
        if self.computes or not self.is_deferred(tensor):
            return self.draw_truncated(tensor, *args, **kwargs)
        self._write(self.draw_truncated, tensor, (View.of(tensor), *args), kwargs, draws=self.draws, overwrites=True)
        return tensor

    def is_deferred(self, tensor: Tensor) -> bool:
        """Whether the values of `tensor` are deferred."""
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self.memories

    def is_written(self, tensor: Tensor) -> bool:
        """Whether `tensor` is deferred, and something has set its values."""
        content = self._memory(tensor).content if self.is_deferred(tensor) else None
        return content is not None and (content.result is not None or bool(content.written))

    def value(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` with its values, on the CPU; itself if it is not deferred."""
        if not self.is_deferred(tensor):
            return tensor.detach()
        before = torch.get_rng_state() if self.draws else None  # another thread may draw where this one does not
        memory = self._run(_compute, self._memory(tensor).content)
        if before is not None:
            torch.set_rng_state(before)
        return View.of(tensor).into(memory)

    def read_later(self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
        """Returns a deferred tensor whose value is what `read` returns, of this `shape` and `dtype`."""
        made = torch.empty(shape, dtype=dtype, device=META)
        self._add(made, (Operation(read, (), {}), 0))
        return made

    def forget(self, tensor: Tensor) -> None:
        """Makes the value of a deferred `tensor` unknown to this process; nothing happens to others."""
        if self.is_deferred(tensor):
            memory = self._memory(tensor)
            memory.content = Content(tensor.dtype, memory.content.elements, (Operation(_refuse, (), {}), 0))

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function` as if nothing was deferred."""
        self.computes = True
        try:
            with torch.no_grad():
                return function(*args)
        finally:
            self.computes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func`, or records it where one of its arguments is deferred."""
        kwargs = dict(kwargs or {})
        if self.computes:
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func in WITHOUT_VALUES and self._is_for_cpu(tensors, kwargs.get("device")):
            made = func(*args, **{**kwargs, "device": META})
            if made.is_floating_point():
                self._add(made, None)
                return made
        if func is aten.scalar_tensor.default:
            kwargs["device"] = None  # which torch takes from the tensor in `tensor[0] = 1.0`
        if not any(map(self.is_deferred, tensors)):
            return func(*args, **kwargs)
        written = list(_find_written(func, args, kwargs))
        if torch.Tag.data_dependent_output in func.tags or not all(map(self.is_deferred, written)):
            args, kwargs = tree_map_only(
                Tensor, lambda each: self.value(each) if self.is_deferred(each) else each, (args, kwargs)
            )
            return func(*args, **kwargs)
        return self._record(func, args, kwargs)

    def _is_for_cpu(self, tensors: Sequence[Tensor], device: torch.device | None) -> bool:
        """Whether a new tensor is to be on the CPU: on `device`, or where `tensors` seem to be."""
        if device is not None:
            return device.type == "cpu"
        return all(each.device.type == "cpu" or self.is_deferred(each) for each in tensors)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does to shapes what `func` does, and records it."""
        written = {each.untyped_storage()._cdata: each for each in _find_written(func, args, kwargs)}
        if len(written) > 1:
            raise CannotDeferError(f"{func} writes into several tensors")
        into = self._memory(next(iter(written.values()))) if written else None

        def describe(tensor: Tensor) -> Tensor | View | Argument:
            if not self.is_deferred(tensor):
                if tensor.is_meta:
                    raise CannotDeferError(f"{func} reads a tensor of the meta device")
                return tensor.detach().clone()  # as it is now
            memory = self._memory(tensor)
            content = memory.content if func not in OF_SHAPE else Content(tensor.dtype, memory.content.elements)
            return View.of(tensor) if memory is into else Argument(content, View.of(tensor))

        described = tree_map_only(Tensor, describe, (args, kwargs))
        shapes = tree_map_only(Tensor, lambda each: each if self.is_deferred(each) else each.to(META), (args, kwargs))
        known = set(self.memories)
        try:
            results = func(*shapes[0], **shapes[1] | ({"device": META} if "device" in kwargs else {}))
        except (NotImplementedError, RuntimeError) as error:
            raise CannotDeferError(f"{func}: {error}") from error
        draws = self.draws and torch.Tag.nondeterministic_seeded in func.tags
        if into is not None:
            (target,) = written.values()
            self._write(func, target, *described, draws=draws, overwrites=func in OVERWRITES)
            return results
        operation = self._operation(func, *described, draws=draws)
        for number, result in enumerate(tree_leaves(results)):
            if not isinstance(result, Tensor | None):
                raise CannotDeferError(f"{func} needs values")
            if result is not None and result.untyped_storage()._cdata not in known:
                self._add(result, (operation, number))
        if draws:
            self._run(_perform, operation)  # so that what is drawn next is what would be drawn next
        return results

    def _write(
        self, func: Any, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool, overwrites: bool
    ) -> None:
        """Records that `func` writes into `target`; whether it draws, and `overwrites` all of it."""
        operation, memory = self._operation(func, args, kwargs, draws=draws), self._memory(target)
        content = memory.content
        if overwrites and target.is_contiguous() and target.numel() == content.elements:
            content = Content(content.dtype, content.elements)
        memory.content = _check(replace(content, written=(*content.written, operation)))
        if draws:
            self._run(_compute, memory.content)

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool) -> Operation:
        if draws and any(isinstance(each, torch.Generator) for each in tree_leaves((args, kwargs))):
            raise CannotDeferError(f"{func} draws from a generator of its own")
        return Operation(func, args, kwargs, torch.get_rng_state() if draws else None)

    def _add(self, tensor: Tensor, result: tuple[Operation, int] | None) -> None:
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        self.memories[storage._cdata] = Memory(storage, _check(Content(tensor.dtype, elements, result)))

    def _memory(self, tensor: Tensor) -> Memory:
        memory = self.memories[tensor.untyped_storage()._cdata]
        if memory.content.dtype != tensor.dtype:
            raise CannotDeferError(f"a {memory.content.dtype} tensor is read as {tensor.dtype}")
        return memory


class _SeemOnCpu(TorchFunctionMode):
    """Makes deferred tensors say that they are on the CPU, as code may leave tensors on the meta device as they are."""

    def __init__(self, deferred: DeferredTensors) -> None:
        super().__init__()
        self.deferred = deferred
        getters: Any = Tensor.is_meta, Tensor.device
        self.answers = dict(zip((each.__get__ for each in getters), (False, torch.device("cpu")), strict=True))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func`, or answers for a deferred tensor."""
        if func in self.answers and self.deferred.is_deferred(args[0]):
            return self.answers[func]
        return func(*args, **(kwargs or {}))


def _refuse() -> Tensor:
    raise CannotDeferError("another process has this weight")


def _find_written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments that `func` writes into."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(given) if isinstance(each, Tensor))


def _check(content: Content) -> Content:
    """Returns `content`. Raises CannotDeferError if it takes too long to compute."""
    if content.count > LIMIT:
        raise CannotDeferError(f"more than {LIMIT} operations make a tensor")
    return content


def _compute(content: Content) -> Tensor:
    """Returns a tensor of which `content` is the memory. Changes the state of the random generator."""
    if content.result is None:
        memory = torch.empty(content.elements, dtype=content.dtype)
    else:
        operation, number = content.result
        memory = tree_leaves(_perform(operation))[number]
    for operation in content.written:
        _perform(operation, memory)
    return memory


def _perform(operation: Operation, memory: Tensor | None = None) -> Any:
    """Returns the result of `operation`, which may write into `memory`."""

    def fetch(described: View | Argument) -> Tensor:
        if isinstance(described, Argument):
            return described.view.into(_compute(described.content))
        assert memory is not None, "it writes"
        return described.into(memory)

    args, kwargs = tree_map_only((View, Argument), fetch, (operation.args, dict(operation.kwargs)))
    if operation.generator is not None:
        torch.set_rng_state(operation.generator)
    return operation.function(*args, **kwargs)
