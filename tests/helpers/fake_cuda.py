"""A machine with one CUDA device without data, on which a torch without CUDA trains, in a process of its own.

Tensors are FakeTensors on "cuda:0", so shapes, dtypes and devices are those of a GPU, and an operation that mixes
devices fails. Values do not exist: a question about one gets an answer like that of a healthy run, and is recorded,
since a GPU would wait there.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

DEVICE = torch.device("cuda", 0)
ASK_FOR_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")


def compile_guard(folder: Path) -> Path:
    """Compiles fake_cuda.cpp into `folder` with torch's own headers; skips the test where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and g++")
    root, library = Path(torch.__file__).parent, folder / "fake_cuda.so"
    source = Path(__file__).with_suffix(".cpp")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", abi, f"-I{root / 'include'}", str(source)]
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, "-o", str(library), *libraries], check=True)
    return library


class _Generator:
    def manual_seed(self, seed: int) -> None:
        assert isinstance(seed, int)


class _Event:
    """An event after which a copy that nobody waited for has arrived: at once."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Waits(TorchDispatchMode):
    """Records the questions about values of tensors on the device, each of which a GPU would have to wait for.

    Attributes:
        places: the line of terakoya, torch.optim or Transformers that asked, by question.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs `func`; a truth value is True, another scalar 1.0 or 0."""
        name = func._schema.name.split("::")[1]
        on_device = any(isinstance(each, torch.Tensor) and each.device.type == "cuda" for each in args)
        self.operations += on_device
        named = kwargs or {}
        copied = name == "_to_copy" and named.get("device") == torch.device("cpu") and not named.get("non_blocking")
        if on_device and (copied or name in ASK_FOR_VALUES):
            parts = ("terakoya", "transformers", "torch/optim")
            lines = [each for each in traceback.extract_stack() if any(part in each.filename for part in parts)]
            self.places.append(f"{name}: {Path(lines[-1].filename).name}: {lines[-1].line}" if lines else name)
        if name == "_local_scalar_dense":
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        return func(*args, **named)


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


def _move(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    """Puts parameters and buffers of `module` on the device; `Module.to` cannot replace tensors without data."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for name, value in tensors.items():
                if value is None or value.device == DEVICE:
                    continue
                if id(value) not in moved:
                    there: torch.Tensor = torch.empty_like(value, device=DEVICE)
                    moved[id(value)] = nn.Parameter(there, value.requires_grad) if is_parameter else there
                tensors[name] = moved[id(value)]  # type: ignore[assignment]
    return module


@contextlib.contextmanager
def machine() -> Iterator[Waits]:
    """While open, this process sees one CUDA device."""
    answers = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_name": lambda *_: "fake", "is_bf16_supported": lambda *_, **__: True,
        "default_generators": (_Generator(),), "Event": _Event,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch("accelerate.state.check_cuda_p2p_ib_support", lambda: True))
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(mock.patch.object(FakeTensor, "numpy", lambda tensor: np.ones(tensor.shape)))
        stack.enter_context(mock.patch.object(nn.Module, "to", _move))
        # some models repeat their initialisation until all values fit
        stack.enter_context(mock.patch.object(PreTrainedModel, "initialize_weights", lambda model: None))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Indexing())
        yield stack.enter_context(Waits())
