"""DeepSpeed's ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) as an `Engine`.

Stage 0 shards nothing, stage 1 the optimizer's state, stage 2 also gradients, stage 3 also weights. Gradients are
reduced in the backward (stage 0: after it); stages 1 and 2 gather updated weights after a step, stage 3 gathers weights
for each forward and backward. The module may be any `nn.Module`. From stage 1 on the optimizer updates flat tensors, or
whole tensors where it needs them (`whole_tensors`).

Weights, gradients and state are fp32 in every stage; bf16 and fp16 are autocast in the module's forward, as without
DeepSpeed, so a stage changes where numbers are stored and not their values. DeepSpeed's own section `fp16`, which would
keep weights in fp16, stays off: gradients are unscaled before DeepSpeed sees them. Stage 3 therefore gathers fp32
weights, twice the bytes that `fsdp` gathers. Checkpoints hold whole tensors under the module's names: a checkpoint of
any engine, stage or number of processes can be read by any other.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terakoya.errors import UserError
from terakoya.training.engines.engine import LossFn, SavedTensors, autocast_forward, may_update
from terakoya.training.engines.inputs import EngineInputs
from terakoya.training.engines.learning_rates import build_optimizer, set_learning_rate
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_names, whole_shard
from terakoya.training.model.module_parts import saved_values
from terakoya_parallel.deepspeed_setup import (
    deepspeed_config,
    find_local_rank,
    import_deepspeed,
    launcher_variables,
    local_rank_variable,
)
from terakoya_parallel.whole_tensors import Holding, WholeTensors


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that this process updates.

    Attributes:
        flat: the tensor that the optimizer updates; it holds the fragments of many parameters, and padding.
        at: index in `flat` of the fragment's first element.
        start: index in the flattened parameter of the fragment's first element.
        size: number of elements; 0 where other processes update the whole parameter.
    """

    flat: Tensor
    at: int
    start: int
    size: int

    def shard(self, name: str, flat: Tensor, shape: tuple[int, ...]) -> TensorShard:
        """The fragment's values in `flat`, which is laid out like `self.flat`, as a shard of the tensor `name`."""
        return TensorShard(name, flat.view(-1).narrow(0, self.at, self.size), shape, self.start)

    def set_values(self, flat: Tensor, values: Tensor) -> None:
        """Sets the fragment's `values` (size,) in `flat`, which is laid out like `self.flat`."""
        flat.view(-1).narrow(0, self.at, self.size).copy_(values)


class DeepSpeedEngine:
    """An `Engine` that wraps DeepSpeed's engine.

    Attributes:
        full_module: whether `module` holds whole weights: True up to stage 2; stage 3 gathers them for a forward or
            backward only.
    """

    def __init__(self, inputs: EngineInputs) -> None:
        """Wraps the module of `inputs`, and shards it as the stage says.

        Raises:
            UserError: DeepSpeed is not installed, or `parallel.deepspeed_config` sets other batch sizes than the
                parameters.
        """
        parameters, module, context, scaler = inputs.parameters, inputs.module, inputs.context, inputs.scaler
        optimizer, zero_stage = parameters.optimizer, parameters.parallel.zero_stage
        assert zero_stage is not None, "checked when the parameters are read"
        self.context = context
        self.dropout_rank = context.rank
        self.zero_stage = zero_stage
        self.full_module = zero_stage < 3
        self.max_grad_norm = parameters.max_grad_norm
        self.scaler = scaler
        self.module = module.to(context.device)
        autocast_forward(self.module, context.device, parameters.precision)
        self.trainable = {name: value for name, value in module.named_parameters() if value.requires_grad}
        if scaler is not None:
            for value in self.trainable.values():
                value.register_hook(scaler.unscale_gradient)
        fused = context.device.type in ("cpu", "cuda")
        self.optimizer = build_optimizer(optimizer, module, inputs.learning_rate_shares, fused=fused)
        self.fused = bool(self.optimizer.defaults.get("fused"))
        names = {id(value): name for name, value in self.trainable.items()}
        seen_whole = whole_names(optimizer, self.optimizer.param_groups, names) if zero_stage else ()
        elements = sum(value.numel() for value in self.trainable.values())
        self.local_rank = find_local_rank(context)
        with launcher_variables(context.rank, context.world_size, self.local_rank):
            self.wrapped, *_ = import_deepspeed().initialize(
                model=self.module, optimizer=self.optimizer, config=deepspeed_config(inputs, elements)
            )
        self.zero = self.wrapped.optimizer
        self.fragments = self._find_fragments()
        holdings = {name: self._holding(name) for name in seen_whole}
        self.whole = WholeTensors(self.optimizer, holdings, dist.group.WORLD, device=context.device)

    def _holding(self, name: str) -> Holding:
        """This process's fragment of the parameter `name`."""
        fragment, shape = self.fragments[name], _shape(self.trainable[name])
        return Holding(fragment.flat, shape, lambda flat: [fragment.shard(name, flat, shape)])

    def _find_fragments(self) -> dict[str, Fragment]:
        """Returns this process's fragment of each trainable parameter, by name."""
        fragments = {}
        if self.zero_stage in (1, 2):
            flats = {
                id(parameter): flat
                for group, flat in zip(self.zero.bit16_groups, self.zero.single_partition_of_fp32_groups, strict=True)
                for parameter in group
            }
        for name, parameter in self.trainable.items():
            if self.zero_stage == 0:
                fragments[name] = Fragment(parameter, 0, 0, parameter.numel())
            elif self.zero_stage < 3:
                flat, mapping = flats[id(parameter)], parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is None:
                    fragments[name] = Fragment(flat, 0, 0, 0)
                else:
                    in_parameter, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
                    fragments[name] = Fragment(flat, in_flat.start, in_parameter.start, in_flat.numel)
            else:
                group, at, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
                start = min(size * self.context.rank, parameter.ds_numel)  # type: ignore[attr-defined]
                size = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined] # the rest is padding
                fragments[name] = Fragment(self.zero.fp32_partitioned_groups_flat[group], at, start, size)
        return fragments

    # ------------------------------------------------------------------------------------------------- the loop

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`. DeepSpeed divides gradients by the number of ranks, so the loss is multiplied by it first."""
        with local_rank_variable(self.local_rank):
            self.wrapped.set_gradient_accumulation_boundary(last)
            sums = self.wrapped(batch)
            loss = loss_fn(sums) * self.context.world_size
            self.wrapped.backward(loss if self.scaler is None else loss * self.scaler.scale, scale_wrt_gas=False)
        return {name: value.detach() for name, value in sums.items()}

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`. Stage 3 gathers weights in it, so every rank must call it equally often."""
        with torch.no_grad(), local_rank_variable(self.local_rank):
            return self.wrapped(batch)

    def step(self, learning_rate: float, *, skip_above: float = math.inf) -> Tensor:
        """See `Engine`."""
        norm = self._step(learning_rate, skip_above)
        if self.scaler is not None:
            self.scaler.update(norm)
        return norm

    def _step(self, learning_rate: float, skip_above: float) -> Tensor:
        set_learning_rate(self.optimizer, learning_rate)
        if self.zero_stage == 0:
            bound = self.max_grad_norm or float("inf")
            norm = nn.utils.clip_grad_norm_(self.trainable.values(), bound, foreach=True)
            if may_update(norm, skip_above):
                self.wrapped.step()
            else:
                self.wrapped.zero_grad()
            return norm
        assert skip_above == math.inf, "checked when the parameters are read"
        with local_rank_variable(self.local_rank):
            self.wrapped.step()
        total = float("nan") if self.zero.overflow else self.wrapped.get_global_grad_norm()
        return torch.as_tensor(total, dtype=torch.float32, device=self.context.device)

    # --------------------------------------------------------------------------------------------- checkpoints

    def weight_shards(self) -> list[TensorShard]:
        """See `Engine`. Every process has whole weights in stage 0, and rank 0 returns them."""
        shards = [
            fragment.shard(name, fragment.flat.detach(), _shape(self.trainable[name]))
            for name, fragment in self.fragments.items()
            if fragment.size and (self.zero_stage or self.context.is_main)
        ]
        return [whole_shard(shard.name, shard.value.view(shard.shape)) if shard.is_whole else shard for shard in shards]

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. Each process writes what it alone holds, without gathering; replicated tensors are divided."""
        sharded, replicated = self._weights() if kind == "model" else self._state()
        yield from (shard for shard in sharded if shard.value.numel())
        yield from assign_shards(replicated, self.context.rank, self.context.world_size)
        if kind == "optimizer":
            yield from self.whole.state_shards()

    def _weights(self) -> tuple[list[TensorShard], list[TensorShard]]:
        """Parameters and buffers: this process's shards of those that are sharded, and those that every process holds
        whole."""
        sharded, replicated = [], []
        for name, value in saved_values(self.module):
            fragment = self.fragments.get(name)
            if fragment is not None and self.zero_stage:
                sharded.append(fragment.shard(name, fragment.flat.detach(), _shape(value)))
            elif hasattr(value, "ds_id"):  # frozen, in stage 3
                own = value.ds_tensor.detach().view(-1)  # type: ignore[attr-defined]
                start = min(self.context.rank * own.numel(), value.ds_numel)  # type: ignore[attr-defined]
                sharded.append(TensorShard(name, own[: value.ds_numel - start], _shape(value), start))  # type: ignore[attr-defined]
            else:
                replicated.append(whole_shard(name, value.detach()))
        return sharded, replicated

    def _state(self) -> tuple[list[TensorShard], list[TensorShard]]:
        """The optimizer's state, divided in the same way."""
        sharded, replicated = [], []
        for name, parameter in self.trainable.items():
            fragment = self.fragments[name]
            for key, value in self.optimizer.state.get(fragment.flat, {}).items():
                if value.shape != fragment.flat.shape:  # a step count, one tensor for many parameters
                    replicated.append(whole_shard(f"{name}/{key}", value.clone()))
                elif self.zero_stage == 0:
                    replicated.append(whole_shard(f"{name}/{key}", value))
                else:
                    sharded.append(fragment.shard(f"{name}/{key}", value, _shape(parameter)))
        return sharded, replicated

    def load_parameters(self, values: SavedTensors) -> None:
        """See `Engine`. Of a sharded weight rank 0 reads the whole tensor, and each process its own fragment."""
        for name, value in saved_values(self.module):
            with torch.no_grad(), self._whole(value):
                if self.context.is_main or not hasattr(value, "ds_id"):
                    value.copy_(values(name))
            fragment = self.fragments.get(name)
            if fragment is not None and self.zero_stage:
                fragment.set_values(fragment.flat.data, values.part(name, fragment.start, fragment.size))

    def _whole(self, value: Tensor) -> contextlib.AbstractContextManager[Any]:
        """While open, `value` is whole in every stage; rank 0's changes are distributed when it closes."""
        if not hasattr(value, "ds_id"):
            return contextlib.nullcontext()
        import deepspeed

        gathered: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([value], modifier_rank=0)
        return gathered

    def load_optimizer_state(self, values: SavedTensors, names: frozenset[str]) -> None:
        """See `Engine`.

        Raises:
            UserError: parameters in the same flat tensor have different step counts, or some have none.
        """
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for each in sorted(names):
            owner, _, key = each.rpartition("/")
            keys[owner].append(key)
        self.optimizer.state.clear()
        self.whole.load_state(values, names)
        fused = {id(each) for group in self.optimizer.param_groups if group.get("fused") for each in group["params"]}
        for name, parameter in self.trainable.items():
            if name in self.whole:
                continue
            fragment = self.fragments[name]
            state = self.optimizer.state[fragment.flat] if keys[name] else {}
            for key in keys[name]:
                if key == "step" or values.shape(f"{name}/{key}") != _shape(parameter):
                    value = values(f"{name}/{key}")
                    # step counts are on the values' device if the optimizer's kernels are fused, else on the host
                    on_device = self.fused or id(fragment.flat) in fused or value.ndim
                    device = fragment.flat.device if on_device else "cpu"
                    if not torch.equal(state.setdefault(key, value.to(device, copy=True)).cpu(), value):
                        raise _other_value(name, key, value, state)
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(fragment.flat, requires_grad=False)
                fragment.set_values(state[key], values.part(f"{name}/{key}", fragment.start, fragment.size))
        for name, fragment in self.fragments.items():
            state = self.optimizer.state.get(fragment.flat, {})
            count = state.get("step")
            # a parameter that was frozen before; a count that no step changes corrects nothing
            if count is not None and not keys[name] and name not in self.whole and 0 < count < count + 1:
                raise _other_value(name, "step", torch.tensor(0.0), state)


def _other_value(name: str, key: str, value: Tensor, state: Mapping[str, Tensor]) -> UserError:
    """Returns the error of a parameter whose `value` of `key` is not that of its flat tensor's `state`."""
    return UserError(
        f"{name}: its optimizer state {key} is {value:g} but others have {state[key]:g}; "
        'ZeRO keeps one value for many parameters: resume with engine "ddp"'
    )


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, which stage 3 replaces by an empty tensor."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
