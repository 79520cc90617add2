"""A machine with one CUDA device without data, on which a torch without CUDA trains, in a process of its own.

Tensors are FakeTensors on "cuda:0", so shapes, dtypes and devices are those of a GPU, and an operation fails that mixes
devices, or dtypes where its kernel takes one. Values do not exist: a question about one gets an answer like that of a
healthy run, and is recorded, since a GPU would wait there. Kernels and the bytes that they read and write are counted.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import terakoya
import terakoya_plugins

DEVICE = torch.device("cuda", 0)
ASK_FOR_VALUES = frozenset(
    {
        "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
        "masked_select", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc",
        "repeat_interleave",
    }
)  # fmt: skip
"""Operations whose result, or its shape, the host must read from the device. `repeat_interleave` reaches torch's
dispatcher only with a tensor of repeats."""
NO_KERNEL = frozenset(
    {
        "view", "_unsafe_view", "_reshape_alias", "as_strided", "t", "transpose", "permute", "expand", "squeeze",
        "unsqueeze", "slice", "select", "split", "split_with_sizes", "unbind", "unfold", "diagonal", "detach", "alias",
        "lift_fresh", "set_", "resize_", "device",
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    }
)  # fmt: skip
"""Operations that change how a tensor is seen, or allocate one, and start no kernel."""
ONE_DTYPE = frozenset(
    {
        "mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution",
        "native_layer_norm", "_fused_rms_norm", "index_put", "index_put_", "index_add", "index_add_", "index_copy",
        "index_copy_", "scatter_add", "scatter_add_", "lerp", "lerp_",
        "_varlen_attn", "_flash_attention_forward", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_fused_adam_", "_fused_adamw_", "_foreach_lerp_",
    }
)  # fmt: skip
"""Operations whose kernels on a GPU take values of one dtype and refuse others; without data torch would promote them,
or not look."""
ONLY_WRITTEN = frozenset(
    {
        "copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_", "bernoulli_", "uniform_", "normal_", "random_",
        "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    }
)  # fmt: skip
"""Operations that do not read their first argument: they write it, or take its shape alone."""
ONE_KERNEL = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
"""Operations that a GPU has a kernel for, and that a torch without CUDA would compute step by step."""
WITHOUT_A_FAKE = frozenset({"_fused_adamw_.tensor_lr"})
"""Operations that return nothing and that torch cannot run on tensors without data."""
HOMES = tuple(
    f"{folder}/"
    for folder in (
        Path(str(terakoya.__file__)).parent, *Path(str(terakoya_plugins.__file__)).parents[1].glob("terakoya_*")
    )
)  # fmt: skip
"""The folders of our own code."""
PARTS = (*HOMES, "transformers/", "torch/optim", "lion_pytorch", "fake_cuda_worker")
"""What a path has in whose lines a question is of interest."""
TENSORS_OF_A_LAUNCH = 48
"""About how many tensors one launch of a `_foreach` operation takes: torch's limit is 30 to 110, by their number."""


def compile_guard(folder: Path) -> Path:
    """Compiles fake_cuda.cpp into `folder` with torch's own headers; skips the test without a compiler, and with a
    torch that has CUDA."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and g++")
    if torch.version.cuda is not None:
        pytest.skip("needs a build of torch without CUDA, in whose place the guard would be")
    root, library = Path(torch.__file__).parent, folder / "fake_cuda.so"
    source = Path(__file__).with_suffix(".cpp")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", abi, f"-I{root / 'include'}", str(source)]
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, "-o", str(library), *libraries], check=True)
    return library


class _Generator:
    """The device's generator of random numbers, which keeps its `seeds`."""

    def __init__(self, seeds: list[int]) -> None:
        self.seeds = seeds

    def manual_seed(self, seed: int) -> None:
        assert isinstance(seed, int)
        self.seeds.append(seed)


class _Event:
    """An event after which a copy that nobody waited for has arrived."""

    def __init__(self, work: Work, **_: Any) -> None:
        self.work = work

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        self.work.note_wait("Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        return 1.0


class _Stream:
    """A stream of work on the device."""

    def __init__(self, work: Work, device: torch.device | None = None, priority: int = 0) -> None:
        self.work = work

    def wait_event(self, event: _Event) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event(self.work)

    def synchronize(self) -> None:
        self.work.note_wait("Stream.synchronize")


class Work(TorchDispatchMode):
    """Counts what the device does, and records the questions about values of its tensors, for which a GPU must wait.

    Attributes:
        places: the line of terakoya, torch.optim or Transformers that asked, by question.
        callers: the functions of terakoya, as MODULE.FUNCTION, in which each question was asked, the innermost first.
        seeds: those that the device's generator got.
        kernels: launches, about.
        bytes: what kernels read and write, if each reads its inputs and writes its outputs once.
        unrecordable: what a CUDA graph cannot record: operations with a tensor of the host, and those that torch marks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.places: list[str] = []
        self.callers: list[list[str]] = []
        self.seeds.clear()
        self.unrecordable: list[str] = []
        self.kernels = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func`; a truth value is True, another scalar 1.0 or 0, and every index of a mask is one of a value."""
        name, named = func._schema.name.split("::")[1], kwargs or {}
        given = [each for each in tree_leaves((args, named)) if isinstance(each, torch.Tensor)]
        if name in ONE_DTYPE:
            refuse_mixed_dtypes(name, args, named)
        if asks(func, name, args, named, given):
            self.note_wait(name)
        if name == "_local_scalar_dense":
            self.unrecordable.append(name)
            constant = getattr(args[0], "constant", None)  # of a number of the host, as DeBERTa makes some
            return _value(args[0].dtype) if constant is None else constant.item()
        if name == "equal":
            return True
        try:
            result = None if str(func).removeprefix("aten.") in WITHOUT_A_FAKE else func(*args, **named)
        except DynamicOutputShapeException:
            raise AssertionError(f"the shape of a result depends on values: {self.places[-1:]}") from None
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if torch.Tag.cudagraph_unsafe in func.tags or any(each.device.type == "cpu" for each in given + made):
            self.unrecordable.append(name)
        if name not in NO_KERNEL and any(each.device.type == "cuda" for each in given + made):
            self._count(func, args, named, given, made)
        return result

    def note_wait(self, question: str) -> None:
        """Records that the host waits for the device to answer `question`."""
        stack = traceback.extract_stack()
        lines = [each for each in stack if any(part in each.filename for part in PARTS)]
        self.places.append(f"{question}: {Path(lines[-1].filename).name}: {lines[-1].line}" if lines else question)
        ours = [each for each in reversed(stack) if each.filename.startswith(HOMES)]
        self.callers.append([f"{Path(each.filename).stem}.{each.name}" for each in ours])

    def to_list(self, tensor: torch.Tensor) -> Any:
        """What `tolist` would return, which reads all values at once."""
        if tensor.device.type == "cuda":
            self.note_wait("tolist")
        return np.full(tensor.shape, _value(tensor.dtype)).tolist()

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        named: Mapping[str, Any],
        given: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> None:
        name, launches = func._schema.name.split("::")[1], 1
        if name.startswith(("_foreach", "_fused")):
            launches += len(args[0]) // TENSORS_OF_A_LAUNCH
        self.kernels += launches
        if name in ("embedding", "index_select", "gather"):  # they read what they return, not the whole table
            self.bytes += 2 * sum(each.numel() * each.element_size() for each in made)
            return
        written = made or written_arguments(func, args, named)
        read = given[len(tree_leaves(args[0])) :] if name in ONLY_WRITTEN else given
        if name in ("addmm", "baddbmm") and args[0].ndim > 1:  # the summand is copied into the result first
            self.kernels += 1
            self.bytes += 2 * size(args[0])
        self.bytes += sum(map(size, written)) + sum(map(size, read))


def _value(dtype: torch.dtype) -> bool | float | int:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0


def size(tensor: torch.Tensor) -> int:
    """The bytes of `tensor`, or of the memory behind it where that is less, as where it is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def written_arguments(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[torch.Tensor]:
    """What an operation writes that returns nothing. A fused update writes gradients only where it scales them."""
    name, found = func._schema.name.split("::")[1], []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else named.get(argument.name)
        scaled = argument.name != "grads" or not name.startswith("_fused") or named.get("grad_scale") is not None
        if argument.alias_info is not None and argument.alias_info.is_write and scaled:
            found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return found


def refuse_mixed_dtypes(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raises RuntimeError where values on the device that are operands of `name` have several dtypes. Numbers without a
    dimension, such as counts of steps, are no operands."""
    operands = [each for each in tree_leaves((args, named)) if isinstance(each, torch.Tensor) and each.ndim]
    dtypes = sorted({str(each.dtype) for each in operands if each.is_floating_point() and each.device.type == "cuda"})
    if len(dtypes) > 1:
        raise RuntimeError(f"{name} takes one dtype on a GPU, got {' and '.join(dtypes)}")


def asks(func: Any, name: str, args: tuple[Any, ...], named: Mapping[str, Any], given: list[torch.Tensor]) -> bool:
    """Whether the host must wait for the device in `func`: it reads values, or copies to or from memory that is not
    pinned."""
    on_device = [each for each in given if each.device.type == "cuda"]
    if name in ASK_FOR_VALUES:
        sized = name == "repeat_interleave" and named.get("output_size") is not None
        return bool(on_device) and not sized
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # an index of truth values is searched first
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name == "_to_copy":
        target = torch.device(named.get("device") or args[0].device)
        return "cuda" in (target.type, args[0].device.type) and target.type != args[0].device.type and not named.get(
            "non_blocking"
        )  # fmt: skip
    if name == "copy_":
        types = {args[0].device.type, args[1].device.type}
        return types == {"cpu", "cuda"} and not (args[2] if len(args) > 2 else named.get("non_blocking"))
    return False


class _Indexing(TorchFunctionMode):
    """Computes `tensor[index]` by operations: torch's own way asks a CUDA library, even without data."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return _index(*args)
        return func(*args, **(kwargs or {}))


def _index(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    keys = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [key for key in keys if not isinstance(key, torch.Tensor)]:
        place = next(number for number, key in enumerate(keys) if key is Ellipsis)
        missing = tensor.ndim - sum(key is not None and key is not Ellipsis for key in keys)
        keys[place : place + 1] = [slice(None)] * missing
    if any(isinstance(key, torch.Tensor) for key in keys):
        assert all(isinstance(key, torch.Tensor) or key == slice(None) for key in keys)
        return torch.ops.aten.index.Tensor(tensor, [key if isinstance(key, torch.Tensor) else None for key in keys])
    dimension = 0
    for key in keys:
        if isinstance(key, int):
            tensor = tensor.select(dimension, key)
            continue
        tensor = tensor.unsqueeze(dimension) if key is None else _slice(tensor, dimension, key)
        dimension += 1
    return tensor


def _slice(tensor: torch.Tensor, dimension: int, key: slice) -> torch.Tensor:
    start, stop, step = key.indices(tensor.shape[dimension])
    return torch.ops.aten.slice.Tensor(tensor, dimension, start, stop, step)


def _move(module: nn.Module, *arguments: Any, **named: Any) -> nn.Module:
    """Does what `Module.to` does, which cannot replace tensors without data."""
    device, dtype = torch._C._nn._parse_to(*arguments, **named)[:2]  # type: ignore[attr-defined]
    if device is not None and device.type == "cuda":
        assert device == DEVICE, "a GPU is named with its index"
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for name, value in tensors.items():
                if value is None:
                    continue
                to_dtype = dtype if dtype is not None and value.is_floating_point() else value.dtype
                to_device = device or value.device
                if (value.device, value.dtype) == (to_device, to_dtype):
                    continue
                if id(value) not in moved:
                    there: torch.Tensor = torch.empty(value.shape, dtype=to_dtype, device=to_device)
                    moved[id(value)] = nn.Parameter(there, value.requires_grad) if is_parameter else there
                tensors[name] = moved[id(value)]  # type: ignore[assignment]
    return module


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's fused attention as its memory-efficient kernel, which takes masks and dropout; a torch without CUDA would
    compute the scores."""
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = (each.to(low) for each in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(low)
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    attended: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return attended


def _unreachable(*_: Any, **__: Any) -> None:
    raise AssertionError("tensors without data run no kernel")


@contextlib.contextmanager
def machine() -> Iterator[Work]:
    """While open, this process sees one CUDA device."""
    work = Work()
    stream = partial(_Stream, work)
    answers = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_name": lambda *_: "fake", "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "default_generators": (_Generator(work.seeds),), "Event": partial(_Event, work), "Stream": stream,
        "current_stream": stream, "device": contextlib.nullcontext, "stream": contextlib.nullcontext,
        "synchronize": lambda *_: work.note_wait("synchronize"), "get_rng_state": lambda *_: torch.empty(0),
        "set_rng_state": lambda *_: None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch("accelerate.state.check_cuda_p2p_ib_support", lambda: True))
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name in ONE_KERNEL:
            library.impl(name, _unreachable, "CUDA")
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(mock.patch.object(FakeTensor, "numpy", lambda tensor: np.ones(tensor.shape)))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: work.to_list(tensor)))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata))
        stack.enter_context(mock.patch.object(nn.Module, "to", _move))
        # some models repeat their initialisation until all values fit
        stack.enter_context(mock.patch.object(PreTrainedModel, "initialize_weights", lambda model: None))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Indexing())
        yield stack.enter_context(work)
