"""Runs code on tensors with shapes and without data: a model is built and tried in no time, whatever its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from terakoya.checking.synthetic_rows import full_rows
from terakoya.components import Architecture, Batch
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.attributes import replace_attribute
from terakoya.training.batches import to_device

DEPTH_FIELDS = ("num_hidden_layers", "num_layers")
"""Transformers' names for the number of layers."""
REMEMBERED = 1 << 20
"""Elements of the largest tensor whose values are kept."""


class KnownValues(TorchDispatchMode):
    """While active, operations on the batch alone also run with real values (`take`), so that code can ask where
    documents begin. Other questions about values, which tensors without data cannot answer, are answered with 1 or
    True: the norm of a gradient, for example, is finite."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self._values = WeakIdKeyDictionary()  # a tensor without data -> the same tensor with data

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors without data, of which those by the same names in `tensors` are the real values."""
        taken: dict[str, Tensor] = {name: self.fake.from_tensor(tensor) for name, tensor in tensors.items()}
        for name, tensor in taken.items():
            self._values[tensor] = tensors[name]
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func`."""
        named = dict(kwargs or {})
        inputs = tensors_in((*args, *named.values()))
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
        if known and sum(each.numel() for each in tensors_in(result)) <= REMEMBERED:
            values = _as_list(self._run_with_values(func, args, named))
            for each, real in zip(_as_list(result), values, strict=True):
                if isinstance(each, Tensor) and each not in self._values:
                    self._values[each] = real
        return result

    def _run_with_values(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs `func` on the real values of its arguments."""
        real_args, real_kwargs = tree_map_only(Tensor, lambda each: self._values[each], (args, dict(kwargs)))
        with unset_fake_temporarily():
            return func(*real_args, **real_kwargs)


Watch = TypeVar("Watch", bound=KnownValues)


@contextmanager
def fake_tensors(watch: Callable[[FakeTensorMode], Watch]) -> Iterator[Watch]:
    """While open, new tensors have no data, and `watch` sees all operations. torch's random generator is restored.

    Models do not initialise their weights: some repeat that until all values fit, which they never do without data.
    Copies of modules share the mode: torch would copy it with each tensor, and with it pointers that are freed twice.
    """
    from transformers import PreTrainedModel

    with (
        replace_attribute(PreTrainedModel, "initialize_weights", lambda model: None),
        replace_attribute(FakeTensor, "__deepcopy__", _copy_without_data),
        torch.random.fork_rng(devices=()), FakeTensorMode() as fake, watch(fake) as found,
    ):  # fmt: skip
        yield found


def _copy_without_data(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """What `copy.deepcopy` makes of a tensor or parameter without data; `memo` has the copies by the originals' ids."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def number_of_layers(architecture: Architecture) -> int:
    """The number of layers of `architecture`; 0 if it has none of the usual fields."""
    depths = [getattr(architecture, name, None) for name in DEPTH_FIELDS]
    return next((depth for depth in depths if isinstance(depth, int)), 0)


def with_depth(parameters: Parameters, depth: int) -> Parameters | None:
    """Returns `parameters` with `depth` layers; None if that would change more than the depth."""
    architecture = parameters.architecture
    field = next((name for name in DEPTH_FIELDS if hasattr(architecture, name)), None)
    if field is None or parameters.frozen_layers > 0 or getattr(architecture, "num_decoder_layers", None) is not None:
        return None
    try:
        smaller: Architecture = type(architecture).model_validate({**architecture.model_dump(), field: depth})
    except ValidationError:
        return None
    return parameters.model_copy(update={"architecture": smaller})


def full_batch(
    parameters: Parameters, vocabulary: Vocabulary, *, rows: int, whole_rows: bool
) -> tuple[Batch, dict[str, Tensor]]:
    """Returns a micro-batch of full `rows` and its tensors; with `whole_rows`, causal ones say that each is one
    document."""
    layout, length = parameters.objective.row_layout(), parameters.data.sequence_length
    batch = parameters.objective.collate(full_rows(layout, vocabulary, rows=rows, sequence_length=length), vocabulary)
    tensors = to_device(batch, torch.device("cpu"), flash=False)
    if whole_rows and layout.framing == "causal":
        tensors[attention.WHOLE_ROWS] = torch.empty(0, dtype=torch.int64)
    return batch, tensors


def tensors_in(result: Any) -> list[Tensor]:
    """Returns the tensors of a result, or of several arguments."""
    return [each for each in _as_list(result) if isinstance(each, Tensor)]


def _as_list(result: Any) -> list[Any]:
    """The results of an operation as a list."""
    return list(result) if isinstance(result, tuple | list) else [result]


def _one(dtype: torch.dtype) -> bool | int | float:
    """A scalar of `dtype` that is true, positive and finite."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
