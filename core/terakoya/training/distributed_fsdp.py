"""torch's `fully_shard` (FSDP2; Zhao et al., 2023, arXiv:2304.11277) as an `Engine`: each process keeps a piece of
every weight, of its gradient and of its optimizer state.

Each block of each model is a group, all else (embeddings, heads, weights that several modules share) is another. A
group's weights are gathered for its forward and again for its backward and are let go after each; the last group's stay
in between. Pieces are rows, in one run: of a weight with n rows the first ceil(n / processes) lie with the first
process, and so on, so that the last ones may have fewer, or none.

The optimizer sees pieces as plain tensors. Weights, gradients and state are fp32; bf16 and fp16 are autocast in the
module's forward, as under DDP. Checkpoints hold whole tensors under the module's names: one written by any engine or
number of processes is read by any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from terakoya.data.vocab import Vocabulary
from terakoya.errors import UserError
from terakoya.parameters import Parameters
from terakoya.training.distributed import Connection, DDPEngine
from terakoya.training.engine import Weigh, saved_values
from terakoya.training.frozen import architecture_of, models
from terakoya.training.loss_scaling import LossScaler


class FSDPEngine(DDPEngine):
    """An `Engine` whose module is cut up by `fully_shard`, over two or more processes.

    Attributes:
        groups: the modules whose weights travel together; the root module, which has the rest, is the last.
        pieces: by name this process's piece of each parameter that is trained: what the optimizer knows.
    """

    full_module = False

    def __init__(
        self,
        connection: Connection,
        module: nn.Module,
        parameters: Parameters,
        vocabulary: Vocabulary,
        *,
        scaler: LossScaler | None = None,
    ) -> None:
        """Cuts up `module`, whose weights are rank 0's.

        Raises:
            UserError: no architecture of `parameters` says where a model's blocks are, or a weight cannot be cut up.
        """
        assert parameters.optimizer.elementwise, "refused with the parameters"
        assert connection.across is not None, "one process has nothing to share"
        optimizer = parameters.optimizer.build(module, fused=connection.device.type in ("cpu", "cuda"))
        names = {id(value): name for name, value in module.named_parameters()}
        given = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []  # a reference would keep the whole weight on the device
        spread(module, connection.device, connection.across)
        self.mesh = DeviceMesh.from_group(connection.across, connection.device.type)
        self.groups = shard(parameters, module, vocabulary, self.mesh)
        super().__init__(
            connection, module, optimizer,
            precision=parameters.precision, max_grad_norm=parameters.max_grad_norm, scaler=scaler,
        )  # fmt: skip
        self.pieces = {
            name: nn.Parameter(_local(value)) for name, value in module.named_parameters() if value.requires_grad
        }
        for group, its_names in zip(optimizer.param_groups, given, strict=True):
            group["params"] = [self.pieces[name] for name in its_names]
        self.trainable = list(self.pieces.values())

    def reducing(self) -> None:
        """Nobody: `fully_shard` adds gradients up itself."""

    # ------------------------------------------------------------------------------------------------- the loop

    def micro_step(self, batch: Mapping[str, Tensor], weigh: Weigh, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`. Until the `last` one each process keeps whole gradients, its own."""
        for group in self.groups:
            group.set_requires_gradient_sync(last, recurse=False)
        sums = super().micro_step(batch, weigh, last=last)
        if last:
            for name, value in self.module.named_parameters():
                if value.grad is not None:
                    self.pieces[name].grad = _local(value.grad)
                    value.grad = None
        return sums

    def clip(self) -> Tensor:
        """See `DDPEngine`. The norm is that of all pieces, so that all processes clip, or leave a step out, alike."""
        gradients = [piece.grad for piece in self.trainable if piece.grad is not None and piece.numel()]
        mine = nn.utils.get_total_norm(gradients, foreach=True).to(self.connection.device, torch.float64)
        norm = self.connection.sum_on_device(mine.square()).sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trainable, self.max_grad_norm or float("inf"), norm, foreach=True)
        return norm

    # --------------------------------------------------------------------------------------------- checkpoints

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        for name, value in self._values():
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def load_parameters(self, values: Callable[[str], Tensor]) -> None:
        """See `Engine`."""
        for name, value in self._values():
            whole = values(name)
            if isinstance(value, DTensor):
                _local(value).copy_(self._piece(whole))
            else:
                value.copy_(whole)

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        """`saved_values`, detached: a DTensor of each parameter, a plain tensor of each buffer."""
        root = self.groups[-1]
        root.reshard()  # after a forward without backward it would still be gathered
        for name, value in saved_values(self.module):
            yield name, value.detach()

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        shapes = dict(self.module.named_parameters())
        for name, piece in self.pieces.items():
            shape = shapes[name].shape
            for key, value in self.optimizer.state.get(piece, {}).items():
                if value.ndim == 0:  # a step count, the same for all of the parameter
                    yield f"{name}/{key}", value
                    continue
                assert value.shape == piece.shape, f"{name}/{key}: not elementwise"
                stride = torch.empty(shape, device="meta").stride()
                cut = DTensor.from_local(value, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
                yield f"{name}/{key}", cut.full_tensor()

    def load_optimizer_state(self, values: Callable[[str], Tensor], names: frozenset[str]) -> None:
        """See `Engine`."""
        fused = {each for group in self.optimizer.param_groups if group.get("fused") for each in group["params"]}
        for name, piece in self.pieces.items():
            states = {key.rpartition("/")[2]: key for key in names if key.rpartition("/")[0] == name}
            if not states:
                continue
            on_device = piece in fused or piece.device.type == "cpu"
            self.optimizer.state[piece] = {
                state: self._piece(values(key)).to(piece.device if state != "step" or on_device else "cpu", copy=True)
                for state, key in states.items()
            }

    def _piece(self, whole: Tensor) -> Tensor:
        """This process's rows of `whole`; a scalar is everybody's."""
        if whole.ndim == 0:
            return whole
        rows = -(-len(whole) // self.mesh.size())
        return whole[rows * self.mesh.get_local_rank() :][:rows]


def spread(module: nn.Module, device: torch.device, group: dist.ProcessGroup) -> None:
    """Gives all of `group` the weights and buffers that `module` has on rank 0, by way of `device`, one at a time."""
    for value in [*module.parameters(), *module.buffers()]:
        sent = value.detach().to(device)
        dist.broadcast(sent, src=0, group=group)
        value.detach().copy_(sent)


def shard(parameters: Parameters, module: nn.Module, vocabulary: Vocabulary, mesh: DeviceMesh) -> list[FSDPModule]:
    """Cuts up `module` over `mesh` and moves it to the device, group by group; returns the groups, the root last.

    Raises:
        UserError: no architecture of `parameters` says where a model's blocks are, or a weight is a scalar.
    """
    for name, value in module.named_parameters():
        if value.ndim == 0:
            raise UserError(
                f'parallel.engine "fsdp": {name} is a scalar, which has no rows to share; use engine "ddp", or make it '
                "a tensor of one element"
            )
    groups = []
    for group in [*blocks(parameters, module, vocabulary), module]:
        groups.append(fully_shard(group, mesh=mesh))
        # losses are shares of a global mean already, so gradients are added up and not averaged
        groups[-1].set_gradient_divide_factor(1.0)
        groups[-1].set_force_sum_reduction_for_comms(True)
    return groups


def blocks(parameters: Parameters, module: nn.Module, vocabulary: Vocabulary) -> list[nn.Module]:
    """The blocks of every model in `module`, each once, but for those with a weight that others have too.

    Raises:
        UserError: no architecture of `parameters` says where a model's blocks are.
    """
    found = dict.fromkeys(
        block
        for model in models(module)
        for block in architecture_of(parameters, model, vocabulary, key='parallel.engine "fsdp"').blocks(model)
    )
    everywhere = Counter(map(id, _occurrences(module)))
    return [
        block
        for block in found
        if all(everywhere[each] == count for each, count in Counter(map(id, _occurrences(block))).items())
    ]


def _occurrences(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of `module`, as often as they occur in it."""
    for _, parameter in module.named_parameters(remove_duplicate=False):
        yield parameter


def _local(value: Tensor) -> Tensor:
    """What of `value` lies in this process; shares its memory, and no gradient goes through."""
    assert isinstance(value, DTensor)
    local: Tensor = value.detach().to_local()
    return local
