"""What an engine is: the part of training that differs between DDP, DeepSpeed and others, and what both need for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.tensor_shards import Kind, TensorShard

LossFn = Callable[[Mapping[str, Tensor]], Tensor]
"""From a module's named sums to the scalar whose gradient is wanted."""


class Values(Protocol):
    """Tensors by name, as a checkpoint holds them; on the CPU. UserError for a name that it lacks."""

    def __call__(self, name: str) -> Tensor:
        """The whole tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""

    def part(self, name: str, start: int, size: int) -> Tensor:
        """Elements [start, start + size) of the flattened tensor: (size,)."""


class Engine(Protocol):
    """What runs forward and backward, reduces gradients and updates weights. All keep fp32 master weights.

    Several processes may work on the same rows, as a replica of the model; the sums that their `micro_step` and
    `evaluate` return then add up to those of the rows, over all of them: each its part, or one of them all.
    """

    module: nn.Module
    """The root module itself, unwrapped."""

    full_module: bool
    """Whether `module` holds every weight whole in this process."""

    dropout_rank: int
    """Whose dropout this process draws: those with the same number draw the same."""

    scaler: LossScaler | None
    """What scales losses in fp16; None in every other precision."""

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """Runs forward, and backward of `loss_fn(sums)`, this micro-step's share of the global loss; the `last` one of
        a step reduces gradients over ranks. Returns the module's sums, detached; an engine that runs all micro-steps
        together returns none before the last, and with it those of all."""

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The module's sums without gradients; the module is in evaluation mode."""

    def step(self, learning_rate: float) -> Tensor:
        """Clips, updates and clears gradients; returns their norm before clipping, a float32 scalar on the device.
        A norm that is not finite leaves weights and moments as they were; the `scaler` hears of every norm."""

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """What this process writes into a checkpoint: of "model" the fp32 values of `saved_values`, of "optimizer"
        `parameter_name/state_name` and its value. All processes together give each element once, in shares of nearly
        the same size. On any device, and good until the next step; it may be collective: all go through all of it."""

    def load_parameters(self, values: Values) -> None:
        """Sets each parameter and buffer from `values(name)`; collective."""

    def load_optimizer_state(self, values: Values, names: frozenset[str]) -> None:
        """Sets the optimizer's state from `values(name)` for `names`; collective."""


AUTOCAST_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What autocast computes in. Products that fp8 takes over are no business of autocast's; it has the rest in bf16."""


def autocast_forward(module: nn.Module, device: torch.device, precision: str) -> None:
    """Makes `module` run its forward in autocast where `precision` is not fp32. Weights and gradients stay fp32."""
    if precision == "fp32":
        return
    dtype = AUTOCAST_DTYPES[precision]
    forward = module.forward

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return forward(*args, **kwargs)

    module.forward = cast
