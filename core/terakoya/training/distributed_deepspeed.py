"""DeepSpeed's ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) as an `Engine`: what each process keeps is a share.

Stage 0 shares nothing, 1 the optimizer's state, 2 the gradients too, 3 the weights too. Weights, gradients and state
are fp32 in every stage; bf16 and fp16 are autocast in the module's forward, as without DeepSpeed, so a stage changes
where numbers lie and not what they are. DeepSpeed's own section `fp16`, which would keep weights in fp16, stays off:
gradients have the loss's scale taken off them before DeepSpeed sees them. Checkpoints hold whole tensors under the
module's names: one written by any engine, stage or number of processes is read by any other.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from terakoya.components import Optimizer
from terakoya.errors import UserError
from terakoya.training.distributed import Connection
from terakoya.training.engine import Weigh, autocast_forward, saved_values
from terakoya.training.launcher_variables import local_rank_variable, variables
from terakoya.training.loss_scaling import LossScaler
from terakoya.training.world import Launched

if TYPE_CHECKING:
    from accelerate import Accelerator

PERSISTENCE_THRESHOLD = 100_000
"""Stage 3 keeps parameters of fewer elements than this whole on every process; DeepSpeed's own default."""


def accelerator(launched: Launched, handlers: Sequence[Any]) -> Accelerator:
    """The Accelerator whose processes DeepSpeed may use; `handlers` hold the process group's backend and timeout.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    with variables(launched.rank, launched.world_size, launched.local_rank):
        _quiet_deepspeed()
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        # stage 0 until the engine is built: under stage 3 Transformers would partition models as they are constructed
        plugin = DeepSpeedPlugin(
            hf_ds_config=settings(
                0, max_grad_norm=0.0, micro_steps=1, micro_batch_size=1, world_size=launched.world_size
            ),
            gradient_accumulation_steps=1,
            gradient_clipping=0.0,
            zero_stage=0,
            zero3_init_flag=False,
        )
        return Accelerator(mixed_precision="no", deepspeed_plugin=plugin, kwargs_handlers=list(handlers))


def settings(
    zero_stage: int, *, max_grad_norm: float, micro_steps: int, micro_batch_size: int, world_size: int
) -> dict[str, Any]:
    """DeepSpeed's configuration. What is left out of it has surprising defaults: gradients are clipped at 1.0."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_steps,
        "train_batch_size": micro_batch_size * micro_steps * world_size,
        "gradient_clipping": max_grad_norm if zero_stage else 0.0,  # stage 0 is clipped here, by torch
        "zero_optimization": {"stage": zero_stage, "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this process updates.

    Attributes:
        flat: the tensor the optimizer knows; the pieces of many parameters lie in it, and padding.
        at: where in `flat` the piece starts.
        start: which element of the parameter it starts with.
        size: its elements; 0 where all of the parameter is updated elsewhere.
    """

    flat: Tensor
    at: int
    start: int
    size: int


class DeepSpeedEngine:
    """An `Engine` over DeepSpeed's.

    Attributes:
        full_module: whether `module` holds whole weights; not so in stage 3, outside its forward and backward.
    """

    def __init__(
        self,
        connection: Connection,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        zero_stage: int,
        precision: str,
        max_grad_norm: float,
        micro_steps: int,
        micro_batch_size: int,
        scaler: LossScaler | None = None,
    ) -> None:
        """Wraps `module`, whose weights are drawn and the same on every process, and cuts it up as the stage says."""
        assert not zero_stage or optimizer.elementwise, "refused with the parameters"
        self.connection = connection
        self.dropout_rank = connection.rank
        self.zero_stage = zero_stage
        self.full_module = zero_stage < 3
        self.max_grad_norm = max_grad_norm
        self.scaler = scaler
        self.module = module.to(connection.device)
        autocast_forward(self.module, connection.device, precision)
        self.trainable = {name: value for name, value in module.named_parameters() if value.requires_grad}
        if scaler is not None:
            for value in self.trainable.values():
                value.register_hook(scaler.unscaled)
        self.optimizer = optimizer.build(module, fused=connection.device.type in ("cpu", "cuda"))
        self.fused = bool(self.optimizer.defaults.get("fused"))
        accelerator = connection.accelerator
        accelerator.gradient_accumulation_steps = micro_steps
        accelerator.deepspeed_plugin.deepspeed_config.update(
            settings(
                zero_stage,
                max_grad_norm=max_grad_norm,
                micro_steps=micro_steps,
                micro_batch_size=micro_batch_size,
                world_size=connection.world_size,
            )
        )
        self.local_rank = connection.topology.places[connection.rank].local_rank
        with variables(connection.rank, connection.world_size, self.local_rank):
            self.wrapped, _ = accelerator.prepare(self.module, self.optimizer)
        self.zero = self.wrapped.optimizer
        self.pieces = self._find_pieces()

    def _find_pieces(self) -> dict[str, Piece]:
        """This process's piece of each trainable parameter."""
        pieces = {}
        if self.zero_stage in (1, 2):
            flats = {
                id(parameter): flat
                for group, flat in zip(self.zero.bit16_groups, self.zero.single_partition_of_fp32_groups, strict=True)
                for parameter in group
            }
        for name, parameter in self.trainable.items():
            if self.zero_stage == 0:
                pieces[name] = Piece(parameter, 0, 0, parameter.numel())
            elif self.zero_stage < 3:
                flat, mapping = flats[id(parameter)], parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is None:
                    pieces[name] = Piece(flat, 0, 0, 0)
                else:
                    there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
                    pieces[name] = Piece(flat, here.start, there.start, here.numel)
            else:
                group, at, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
                start = min(size * self.connection.rank, parameter.ds_numel)  # type: ignore[attr-defined]
                size = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined] # the rest is padding
                pieces[name] = Piece(self.zero.fp32_partitioned_groups_flat[group], at, start, size)
        return pieces

    # ------------------------------------------------------------------------------------------------- the loop

    def micro_step(self, batch: Mapping[str, Tensor], weigh: Weigh, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`. DeepSpeed divides by the number of ranks, which the loss is multiplied with beforehand."""
        with local_rank_variable(self.local_rank):
            self.wrapped.set_gradient_accumulation_boundary(last)
            sums = self.wrapped(batch)
            loss = weigh(sums) * self.connection.world_size
            self.wrapped.backward(loss if self.scaler is None else loss * self.scaler.scale, scale_wrt_gas=False)
        return {name: value.detach() for name, value in sums.items()}

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`. In stage 3 weights travel in it: as many calls on every rank."""
        with torch.no_grad(), local_rank_variable(self.local_rank):
            return self.wrapped(batch)

    def step(self, learning_rate: float) -> Tensor:
        """See `Engine`."""
        norm = self._step(learning_rate)
        if self.scaler is not None:
            self.scaler.update(norm)
        return norm

    def _step(self, learning_rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.zero_stage == 0:
            bound = self.max_grad_norm or float("inf")
            norm = nn.utils.clip_grad_norm_(self.trainable.values(), bound, foreach=True)
            if torch.isfinite(norm):
                self.wrapped.step()
            else:
                self.wrapped.zero_grad()
            return norm
        with local_rank_variable(self.local_rank):
            self.wrapped.step()
        total = float("nan") if self.zero.overflow else self.wrapped.get_global_grad_norm()
        return torch.as_tensor(total, dtype=torch.float32, device=self.connection.device)

    # --------------------------------------------------------------------------------------------- checkpoints

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        for name, value in saved_values(self.module):
            with self._whole(value):
                whole = value.detach() if self.full_module else value.detach().clone()
            yield name, whole

    def load_parameters(self, values: Callable[[str], Tensor]) -> None:
        """See `Engine`. Every rank reads; in stage 3 it is rank 0's value that counts."""
        for name, value in saved_values(self.module):
            whole = values(name)
            with torch.no_grad(), self._whole(value, write=True):
                value.copy_(whole)
            piece = self.pieces.get(name)
            if piece is not None and self.zero_stage:
                _put(piece, piece.flat.data, whole)

    def _whole(self, value: Tensor, *, write: bool = False) -> contextlib.AbstractContextManager[Any]:
        """While open, `value` is whole, whatever the stage; with `write`, rank 0's is spread when it closes."""
        if not hasattr(value, "ds_id"):
            return contextlib.nullcontext()
        import deepspeed

        gathered: contextlib.AbstractContextManager[Any]
        gathered = deepspeed.zero.GatheredParameters([value], modifier_rank=0 if write else None)
        return gathered

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        for name, parameter in self.trainable.items():
            piece = self.pieces[name]
            for key, value in self.optimizer.state.get(piece.flat, {}).items():
                if value.shape != piece.flat.shape:  # a step count, the same for all of the tensor
                    yield f"{name}/{key}", value.clone()
                elif self.zero_stage == 0:
                    yield f"{name}/{key}", value
                else:
                    shape = getattr(parameter, "ds_shape", parameter.shape)
                    whole = value.new_zeros(shape)
                    part = value.narrow(0, piece.at, piece.size)
                    whole.flatten().narrow(0, piece.start, piece.size).copy_(part)
                    yield f"{name}/{key}", self.connection.sum_on_device(whole)

    def load_optimizer_state(self, values: Callable[[str], Tensor], names: frozenset[str]) -> None:
        """See `Engine`.

        Raises:
            UserError: parameters that lie in one flat tensor have taken different numbers of steps.
        """
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for each in sorted(names):
            owner, _, key = each.rpartition("/")
            keys[owner].append(key)
        self.optimizer.state.clear()
        fused = {id(each) for group in self.optimizer.param_groups if group.get("fused") for each in group["params"]}
        for name, parameter in self.trainable.items():
            piece = self.pieces[name]
            shape = getattr(parameter, "ds_shape", parameter.shape)
            state = self.optimizer.state[piece.flat] if keys[name] else {}
            for key in keys[name]:
                value = values(f"{name}/{key}")
                if key == "step" or value.shape != shape:
                    # a step count lies beside the values if the optimizer's kernels are fused, else on the host
                    on_device = self.fused or id(piece.flat) in fused or value.ndim
                    device = piece.flat.device if on_device else "cpu"
                    if not torch.equal(state.setdefault(key, value.to(device, copy=True)).cpu(), value):
                        raise UserError(
                            f"{name}: its optimizer state {key} is {value:g} but others have {state[key]:g}; "
                            'ZeRO keeps one for many parameters: resume with engine "ddp"'
                        )
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(piece.flat, requires_grad=False)
                _put(piece, state[key], value)


def _put(piece: Piece, flat: Tensor, whole: Tensor) -> None:
    """Writes this process's part of `whole` into `flat`, which is laid out like `piece.flat`."""
    part = whole.flatten().narrow(0, piece.start, piece.size)
    flat.view(-1).narrow(0, piece.at, piece.size).copy_(part)


def _quiet_deepspeed() -> None:
    """Imports DeepSpeed, silent below warnings, and without the kernels it would compile on a machine without a GPU.

    Raises:
        UserError: it is not installed.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f'parallel.engine "deepspeed": {error}; install it with `pip install "terakoya[deepspeed]"`'
        ) from error
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_tested)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls them
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}


def _tested(record: logging.LogRecord) -> bool:
    """Drops DeepSpeed's warning of optimizers it does not know: `Optimizer.elementwise` is what is asked here."""
    return "untested optimizer" not in record.getMessage()
