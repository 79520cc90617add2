"""What an engine is: the part of training that differs between DDP and others.

An engine wraps the root module, decides which process holds which weights, gradients and optimizer state, and
communicates in `micro_step`, `evaluate`, `step` and when a checkpoint is loaded or saved. It needs of the module a
forward that returns named sums (`Objective.terms`).

See docs/design/engines.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.tensor_shards import Kind, TensorShard

LossFn = Callable[[Mapping[str, Tensor]], Tensor]
"""Maps a module's named sums to the scalar loss to differentiate."""


LARGEST_NORM = torch.finfo(torch.float32).max


def may_update(norm: Tensor, skip_above: float = math.inf) -> Tensor:
    """Whether the gradient `norm`, () float32, is finite and at most `skip_above`: () bool on the same device."""
    return norm <= min(skip_above, LARGEST_NORM)  # NaN is not


class SavedTensors(Protocol):
    """Tensors of a checkpoint by name, on the CPU. All methods raise UserError for a missing name."""

    def __call__(self, name: str) -> Tensor:
        """The whole tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""

    def part(self, name: str, start: int, size: int) -> Tensor:
        """Elements [start, start + size) of the flattened tensor: (size,)."""

    def box(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """The box of the tensor that begins at `start` and has the shape `size`."""


class Engine(Protocol):
    """Runs forward and backward, reduces gradients and updates weights. All engines keep fp32 master weights.

    Several processes may work on the same rows, as one replica of the model. The sums that their `micro_step` and
    `evaluate` return then add up to the sums of the rows: each process returns its part, or one returns everything.
    """

    module: nn.Module
    """The root module itself, unwrapped."""

    full_module: bool
    """Whether `module` holds every weight whole in this process."""

    dropout_rank: int
    """Seeds this process's dropout: processes with the same number draw the same dropout."""

    scaler: LossScaler | None
    """Scales losses in fp16; None in every other precision."""

    optimizer: torch.optim.Optimizer
    """What `build_optimizer` returned."""

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """Runs the forward, and the backward of `loss_fn(sums)`, this micro-step's part of the global loss. The `last`
        micro-step of a step reduces gradients over ranks. Returns the module's sums, detached; an engine that runs all
        micro-steps together returns no sums before the last micro-step, and with it the sums of all."""

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the module's sums without gradients; the module is in evaluation mode."""

    def step(self, learning_rate: float, *, skip_above: float = math.inf) -> Tensor:
        """Clips gradients, updates weights and clears gradients; returns the gradient norm before clipping, a float32
        scalar on the device. A norm that is not finite, or above `skip_above`, leaves weights and moments unchanged;
        the `scaler` is updated with every norm."""

    def weight_shards(self) -> Sequence[TensorShard]:
        """Returns the fp32 values of trained weights as this process keeps them, in the same memory; all processes
        together return each element once. Steps and `load_parameters` change them in place."""

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """Yields what this process writes into a checkpoint: for "model" the fp32 values of `saved_values`, for
        "optimizer" each `parameter_name/state_name` with its value. All processes together yield each element once, in
        nearly equal amounts. Values are on any device and valid until the next step. The iteration may be collective:
        every process must finish it."""

    def load_parameters(self, values: SavedTensors) -> None:
        """Sets each parameter and buffer from `values(name)`; collective."""

    def load_optimizer_state(self, values: SavedTensors, names: frozenset[str]) -> None:
        """Sets the optimizer's state from `values(name)` for `names`; collective."""


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Returns the dtype of autocast with `precision`, None without it. Where products take fewer bits than 16, the rest
    is bf16."""
    return {"fp32": None, "fp16": torch.float16}.get(precision, torch.bfloat16)


def autocast_forward(module: nn.Module, device: torch.device, precision: str) -> None:
    """Makes `module` run its forward in autocast unless `precision` is fp32. Weights and gradients stay fp32."""
    dtype = autocast_dtype(precision)
    if dtype is None:
        return
    forward = module.forward

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return forward(*args, **kwargs)

    module.forward = cast
