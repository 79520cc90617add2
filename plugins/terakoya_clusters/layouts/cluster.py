"""Constants of GPUs and clusters, and the layouts of a run over them.

Each constant names its source: stated by the maker, measured on one such device, or fitted to published runs
(`tools/simulation` says to which runs, and which were held out).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from terakoya.errors import UserError, nearest
from terakoya_planning.devices import GIB

Recomputation = Literal["full", "selective"]
"""What a backward recomputes: `Parameters.activation_checkpointing`."""


@dataclass(frozen=True)
class Gpu:
    """One type of GPU.

    Attributes:
        name: name on the command line.
        peak: dense bfloat16 FLOP/s, as stated by the maker.
        products: fraction of `peak` that large matrix products reach in a whole run, power limits included.
        attention: fraction of `peak` that fused causal attention reaches.
        memory: bytes.
        bandwidth: bytes/s that plain kernels reach in its memory, reads and writes counted.
        link: bytes/s that each GPU of a node sends to the others, in a ring.
        network: bytes/s that each GPU of a node sends to other nodes.
        has_fp8: whether it multiplies numbers of 8 bits.
    """

    name: str
    peak: float
    products: float
    attention: float
    memory: int
    bandwidth: float
    link: float
    network: float
    has_fp8: bool = False


GPUS = (
    # Peaks and memory: makers. Bandwidth: 3.0e12 and 4.3e12 measured as copies on one H100 SXM and one H200, the others
    # the same fraction of what their makers state. Links and networks: 80 % of NVLink (450e9, A100 300e9) and 90 % of
    # one 400 Gb/s (A100 200 Gb/s) adapter per GPU. Products and attention: fitted, those of the H200 are the H100's.
    Gpu("h100", 989e12, 0.67, 0.185, 80 * GIB, 3.0e12, 360e9, 45e9, True),
    Gpu("h200", 989e12, 0.67, 0.185, 141 * GIB, 4.3e12, 360e9, 45e9, True),
    Gpu("a100-80gb", 312e12, 0.84, 0.33, 80 * GIB, 1.8e12, 240e9, 22.5e9),
    Gpu("a100-40gb", 312e12, 0.84, 0.33, 40 * GIB, 1.4e12, 240e9, 22.5e9),
)  # fmt: skip
"""The GPUs whose constants are known well enough."""

LINK_LATENCY, NETWORK_LATENCY = 5e-6, 20e-6
"""Seconds of an empty message within a node and between nodes: orders of magnitude, from NCCL's own tests."""

SMALLER_VARIANTS = frozenset({"pcie", "nvl", "mig"})
"""Words in the names of smaller variants of a GPU."""


def find_gpu(name: str) -> Gpu:
    """Returns the GPU `name`, such as "h100" or "NVIDIA H100 80GB HBM3".

    Raises:
        UserError: its constants are unknown.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    match = next((gpu for gpu in GPUS if set(gpu.name.split("-")) <= words), None)
    if match is None or words & SMALLER_VARIANTS:
        names = [gpu.name for gpu in GPUS]
        raise UserError(f'--gpu: expected {", ".join(names)}, got "{name}"{nearest(name.lower(), names)}')
    return match


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of `per_node` GPUs each.

    Attributes:
        half_speed_size: a product runs at half speed if one of its dimensions has this size: tiles are cut off, and
            the data read for them is reused less.
        traffic_factor: bytes moved for each byte that the formulas count for pointwise operations: there are more
            operations than are counted, and none reaches the speed of a copy.
        exposed_fraction: fraction of the communication that overlaps with products and is not hidden.
        straggler_fraction: fraction of a step that each doubling of nodes adds, as all wait for the slowest.

    The defaults of these four are fitted.
    """

    gpu: Gpu
    gpus: int
    per_node: int = 8
    half_speed_size: float = 236.0
    traffic_factor: float = 1.2
    exposed_fraction: float = 0.81
    straggler_fraction: float = 0.0094

    def group(self, size: int, stride: int = 1) -> tuple[float, float]:
        """Returns bytes/s of each member, and the latency in seconds, of a ring of `size` GPUs with distance `stride`.

        Between nodes a node's members share its adapters, one for each GPU of the ring on the node.
        """
        inside = max(1, min(size, self.per_node // stride))
        if inside >= size:
            return self.gpu.link, LINK_LATENCY
        return min(self.gpu.link, inside * self.gpu.network), NETWORK_LATENCY


@dataclass(frozen=True)
class Layout:
    """How a run is divided among devices.

    Attributes:
        data, tensor, pipeline, sequence: devices along each axis; their product is the number of devices.
            Tensor-parallel devices are neighbours, then sequence-, then data-, then pipeline-parallel ones.
        zero_stage: what data-parallel devices shard: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also
            weights.
        shard: data-parallel devices that shard it among themselves, while such groups hold the same; None: all.
        micro_batch_size: rows of one replica's micro-batch.
        micro_steps: micro-steps of an optimizer step.
        virtual: stages of the model that each device of a pipeline holds, interleaved.
        recomputation: what a backward recomputes.
        norms_shared: whether tensor-parallel devices also divide norms, dropout and residuals, along the sequence
            (`sequence_parallel`).
        keys_gathered: whether sequence-parallel devices gather keys and values (`cp_size`); else they exchange heads
            for positions (`sp_size`).
        stages_near: whether a pipeline's stages are nearer to each other than data-parallel devices.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    zero_stage: int = 0
    shard: int | None = None
    micro_batch_size: int = 1
    micro_steps: int = 1
    virtual: int = 1
    recomputation: Recomputation | None = None
    norms_shared: bool = False
    keys_gathered: bool = False
    stages_near: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.sequence

    @property
    def shards(self) -> int:
        """Number of devices that divide what `zero_stage` shards."""
        return self.shard or self.data * self.sequence

    @property
    def rows(self) -> int:
        """Rows of an optimizer step."""
        return self.data * self.micro_batch_size * self.micro_steps

    def replace(self, **changes: Any) -> Layout:
        """Returns this layout with `changes`."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Program:
    """What a training program holds in memory and sends; sizes are bytes per element.

    Attributes:
        weights, gradients, optimizer: held for each weight; the stage of ZeRO decides which of them are sharded.
        partition: held in addition to whole weights by each device for its own part of them, in stages 1 and 2.
        gathered, reduced: sent for a weight that is all-gathered, and for a gradient that is reduced.
        bucket: bytes of the buffers for gradients.
        computed: held and sent for an element of what a layer computes.
        entering: sent for an element of what enters a tensor-parallel region, such as the output of a norm, and for
            its gradient.
        gathers_again: whether tensor-parallel devices with `norms_shared` keep their own positions of what enters a
            region and gather the others once more in the backward, without hiding it.
        hidden: held and sent for an element of the hidden states, and of their gradients, between pipeline stages:
            those on their way, and the output of each micro-batch in flight. 0 counts none of these in memory.
        max_gathered: elements that stage 3 holds whole at once, at most; None is two layers.
        cast_weights: whether autocast keeps copies of weights in 16 bits.
        fused: pointwise operations are compiled into few kernels, which halves the traffic.
        flash: attention keeps no scores.
        tensor_overlap: fraction of tensor-parallel communication that is hidden behind products.
        recomputed_reductions: all-reduces of a layer that a backward repeats if recomputation is "selective".
        recomputed_products, recomputed_attention, recomputed_traffic: fraction of each of the forward's parts that a
            backward recomputes if recomputation is "selective".
    """

    weights: float = 4
    gradients: float = 4
    optimizer: float = 8
    partition: float = 0
    gathered: float = 4
    reduced: float = 4
    bucket: float = 0
    computed: float = 2
    entering: float = 2
    gathers_again: bool = False
    hidden: float = 0
    max_gathered: float | None = None
    cast_weights: bool = True
    fused: bool = False
    flash: bool = True
    tensor_overlap: float = 0.0
    recomputed_reductions: int = 0
    recomputed_products: float = 0.0
    recomputed_attention: float = 0.0
    recomputed_traffic: float = 1.0
