"""The parts of a root module that one process of a mesh holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from terakoya.components import Copies, ModuleBuild
from terakoya.training.model.module_parts import ADAPTED, named_values
from terakoya_parallel.fsdp_groups import shard_module
from terakoya_parallel.mesh import AXES, DATA, ProcessMesh
from terakoya_parallel.pipeline_stage import Stage
from terakoya_parallel.tensor_division import divide_models
from terakoya_parallel.tensor_layers import ProcessTensorParallelGroup, TensorDivision
from terakoya_parallel.tensor_part import TensorPart

SHARE = ("dp_shard", "sp")
"""The axes along which `fully_shard` divides weights: without it, processes along them hold the same ones."""


@dataclass(frozen=True)
class HeldModule:
    """What this process holds of a root module.

    Attributes:
        module: the root module with this process's parts of layers, or its stages, each a module.
        stages: these stages; empty where this process has all blocks.
        names: name in `module` -> name in the root module, by which everything else is known.
        parts: name -> where this process's values of each parameter and buffer are in the whole tensor.
        alike: name -> the axes along which processes hold the same values.
        in_region: names of the parameters whose gradients are sums over the processes along `tp`.
        groups: of each stage, or of the root module, the modules whose weights `fully_shard` gathers together; the one
            with all other weights is the last. Empty without `fully_shard`.
    """

    module: nn.Module
    stages: Sequence[Stage]
    names: Mapping[str, str]
    parts: Mapping[str, TensorPart]
    alike: Mapping[str, tuple[str, ...]]
    in_region: Sequence[str]
    groups: Sequence[Sequence[FSDPModule]]


def hold_parts(module: nn.Module, run: ModuleBuild, mesh: ProcessMesh, copies: Sequence[Copies] = ()) -> HeldModule:
    """Divides the root `module` of `run` among the processes of `mesh`, in place: returns this process's stages, of
    these its parts of layers, and of these its rows. Collective. `copies` are as in `shard_module`.

    Raises:
        UserError: there are fewer blocks than stages; under `fully_shard` no architecture defines a model's blocks, or
            a weight cannot be sharded.
    """
    architectures, vocabulary, device = run.architectures, run.vocabulary, run.context.device
    parallel, precision = run.parameters.parallel, run.parameters.precision
    names = {id(value): name for name, value in named_values(module)}
    stages: list[Stage] = []
    if mesh.size("pp") > 1:
        count = parallel.pp_size * parallel.pp_stages_per_process
        stages = [
            Stage(module, architectures, vocabulary, index=index, count=count, device=device, precision=precision)
            for index in range(mesh.index("pp"), count, parallel.pp_size)
        ]
        adapted = getattr(module, ADAPTED, False)
        # no ModuleList: optimizers take its items for blocks
        module = nn.ModuleDict({f"stage{stage.index}": stage for stage in stages})
        setattr(module, ADAPTED, adapted)
    own_names = {own: names[id(value)] for own, value in named_values(module)}

    division = TensorDivision()
    if (group := mesh.group("tp")) is not None:
        layers = ProcessTensorParallelGroup(
            mesh.index("tp"), mesh.size("tp"), group, sequence_parallel=parallel.sequence_parallel
        )
        division = divide_models(module, architectures, vocabulary, layers, device)
    in_region = [own_names[own] for own, value in module.named_parameters() if value in division.in_region]

    sharded = parallel.engine == "fsdp" and mesh.size(*SHARE) > 1
    parts, alike = {}, {}
    for own, value in named_values(module):
        part, axes = TensorPart.whole(value.shape), {*DATA, "sp", "tp"}
        if isinstance(value, nn.Parameter) and value in division.parts:
            part, axes = division.parts[value], axes - {"tp"}
        if isinstance(value, nn.Parameter) and sharded:
            part, axes = part.rows(mesh.index(*SHARE), mesh.size(*SHARE)), axes - {*SHARE}
        parts[own_names[own]], alike[own_names[own]] = part, tuple(sorted(axes, key=AXES.index))
    groups: list[list[FSDPModule]] = []
    if sharded:
        shares = mesh.device_mesh(("dp_replicate",), SHARE)
        groups = [
            shard_module(
                each, architectures, vocabulary, shares, precision=precision, stays_gathered=bool(stages), copies=copies
            )
            for each in stages or (module,)
        ]
    return HeldModule(module, stages, own_names, parts, alike, in_region, groups)
