"""Many GPUs: what one of them computes, what moves between them, and how a run may be laid out over them.

Constants are of three kinds, each said beside it: what a maker states, what was measured on one such device, and what
was fitted to published runs (`tools/simulation` says to which, and which were held out).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from terakoya.errors import UserError, nearest
from terakoya.estimation.devices import GIB

Recomputation = Literal["full", "selective"]
"""What a backward computes again: `Parameters.activation_checkpointing`."""


@dataclass(frozen=True)
class Gpu:
    """One device.

    Attributes:
        name: for the command line.
        peak: dense bfloat16 FLOP/s, as its maker states it.
        products: the share of `peak` that large matrix products reach in a whole run, power limits included.
        attention: the share of `peak` that fused causal attention reaches.
        memory: bytes.
        bandwidth: bytes/s of its memory that plain kernels reach, reading and writing counted.
        link: bytes/s that each device of a node sends to the others, in a ring.
        network: bytes/s that each device of a node sends to other nodes.
    """

    name: str
    peak: float
    products: float
    attention: float
    memory: int
    bandwidth: float
    link: float
    network: float


GPUS = (
    # Peaks and memory: makers. Bandwidth: 3.0e12 and 4.3e12 measured as copies on one H100 SXM and one H200, the others
    # at the same share of what their makers state. Links and networks: 80 % of NVLink's (450e9, A100 300e9) and 90 % of
    # a 400 Gb/s (A100 200 Gb/s) adapter for each device. Products and attention: fitted, H200's taken from the H100.
    Gpu("h100", 989e12, 0.67, 0.185, 80 * GIB, 3.0e12, 360e9, 45e9),
    Gpu("h200", 989e12, 0.67, 0.185, 141 * GIB, 4.3e12, 360e9, 45e9),
    Gpu("a100-80gb", 312e12, 0.84, 0.33, 80 * GIB, 1.8e12, 240e9, 22.5e9),
    Gpu("a100-40gb", 312e12, 0.84, 0.33, 40 * GIB, 1.4e12, 240e9, 22.5e9),
)  # fmt: skip
"""The devices whose constants are known well enough."""

LINK_LATENCY, NETWORK_LATENCY = 5e-6, 20e-6
"""Seconds that a message of no size takes within a node and between two, as NCCL's own tests show them: orders of
magnitude."""


OTHERS = frozenset({"pcie", "nvl", "mig"})
"""Words by which a device of the same name has fewer of everything."""


def find_gpu(name: str) -> Gpu:
    """The device `name`, such as "h100" or "NVIDIA H100 80GB HBM3".

    Raises:
        UserError: its constants are not known.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    found = next((each for each in GPUS if set(each.name.split("-")) <= words), None)
    if found is None or words & OTHERS:
        names = [each.name for each in GPUS]
        raise UserError(f'--gpu: expected {", ".join(names)}, got "{name}"{nearest(name.lower(), names)}')
    return found


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of `per_node` devices each.

    Attributes:
        half: where a product's dimension is this narrow, its speed falls to a half: tiles are cut short, and what is
            read for them is used less.
        passes: how often memory is passed for each byte that pointwise operations are counted to read and write: they
            are more than are counted, and none reaches the speed of a copy.
        exposed: the share of communication beside products that these do not hide.
        waiting: the share of a step that each doubling of nodes adds, as all wait for the slowest.

    The defaults of these four are fitted.
    """

    gpu: Gpu
    gpus: int
    per_node: int = 8
    half: float = 236.0
    passes: float = 1.2
    exposed: float = 0.81
    waiting: float = 0.0094

    def group(self, size: int, stride: int = 1) -> tuple[float, float]:
        """Bytes/s of each member, and the latency in seconds, of a ring of `size` devices that lie `stride` apart.

        Between nodes a node's members share its adapters, one for each device of the ring there.
        """
        inside = max(1, min(size, self.per_node // stride))
        if inside >= size:
            return self.gpu.link, LINK_LATENCY
        return min(self.gpu.link, inside * self.gpu.network), NETWORK_LATENCY


@dataclass(frozen=True)
class Layout:
    """How the work is spread.

    Attributes:
        data, tensor, pipeline, sequence: devices along each axis; their product is all of them. Tensor-parallel ones
            are neighbours, then sequence-, then data-, then pipeline-parallel ones; with `stages_near` a pipeline's
            stages are nearer than data-parallel ones.
        zero_stage: what data-parallel devices share: 0 nothing, 1 the optimizer's state, 2 gradients, 3 weights.
        micro_batch_size: rows that one replica takes at once.
        micro_steps: of an optimizer step.
        virtual: pieces of the model that each device of a pipeline holds, interleaved.
        recomputation: what a backward computes again.
        norms_shared: whether tensor-parallel devices share norms and residuals too, along the sequence.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    micro_steps: int = 1
    virtual: int = 1
    recomputation: Recomputation | None = None
    norms_shared: bool = False
    stages_near: bool = False

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline * self.sequence

    @property
    def rows(self) -> int:
        """Rows of an optimizer step."""
        return self.data * self.micro_batch_size * self.micro_steps

    def changed(self, **changes: Any) -> Layout:
        """This layout with `changes`."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Program:
    """What a program keeps and moves; sizes are bytes an element.

    Attributes:
        weights, gradients, optimizer: kept for each weight, by the stage of ZeRO that shares all or nothing of it.
        partition: kept beside whole weights by each device for its own share of them, in stages 1 and 2.
        gathered, reduced: of a weight that is sent to those who share it, and of a gradient.
        bucket: bytes through which gradients are sent.
        travels: of a number of the hidden states that stages of a pipeline send, and of their gradients: what is on its
            way, and the output of each micro-batch in flight. 0 counts none of it.
        ends_shared: whether tensor-parallel devices share embeddings and logits too.
        live: elements that stage 3 holds whole at once, at most; None is two layers.
        fused: pointwise operations are compiled into few kernels, which moves half.
        flash: attention keeps no scores.
        overlaps_tensor: the share of tensor-parallel communication that is hidden beside products.
        again_products, again_attention, again_traffic: of each the share of the forward that a backward computes again
            where recomputation is "selective".
    """

    weights: float = 4
    gradients: float = 4
    optimizer: float = 8
    partition: float = 0
    gathered: float = 4
    reduced: float = 4
    bucket: float = 0
    travels: float = 0
    ends_shared: bool = True
    live: float | None = None
    fused: bool = False
    flash: bool = True
    overlaps_tensor: float = 0.0
    again_products: float = 0.0
    again_attention: float = 0.0
    again_traffic: float = 1.0
