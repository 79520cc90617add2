"""How long an optimizer step takes on many devices, by formula: products, memory traffic, communication, bubble.

Each term is written where it is computed. What is not there: time to launch kernels, which counts for small models
alone, reading data, logging, checkpoints, and devices that are slower than others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from terakoya.estimation.layouts.cluster import Cluster, Layout, Program
from terakoya.estimation.layouts.transformer import LAYER_TRAFFIC, LOGITS_TRAFFIC, Transformer

BACKWARD = 2.0
"""What a backward's products and traffic take of the forward's; of attention's, whose scores it computes again, 2.5."""
ATTENTION_BACKWARD = 2.5
LOWER = 2
"""Bytes of an activation that is sent."""
OPTIMIZER_TRAFFIC = 36
"""Bytes an element of a step of AdamW in float32: weight, gradient and two moments read, three written, the norm of the
gradient taken and gradients cleared."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by what they go to, none counted twice.

    Attributes:
        parts: products, attention, memory traffic, again (the same three for what a backward computes again), tensor,
            sequence, pipeline and data communication as far as they are not hidden, bubble, optimizer, waiting.
        tokens: of all devices.
        flops: of a token, work that must be done.
    """

    parts: Mapping[str, float]
    tokens: int
    flops: float
    devices: int
    peak: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """TFLOP/s of a device."""
        return self.flops * self.tokens_per_second / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """The share of the peak that work which must be done takes."""
        return self.tflops * 1e12 / self.peak


def step_time(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> StepTime:
    """The time of one step of `model` in this `layout`.

    A pipeline's stages hold equally many layers, the last one the head too: each micro-batch takes as long as the
    slowest stage, and the first one has to pass through all others, or with `virtual` pieces through a part of them
    (Narayanan et al., 2021, arXiv:2104.04473, section 2.2): m t_max + (sum of the others) / v, which is
    (m + (p - 1) / v) t where stages are alike.
    """
    stage = {
        part: each * model.layers / layout.pipeline for part, each in _layer(model, layout, cluster, program).items()
    }
    head = _head(model, layout, cluster, program)
    sends = _sends(model, layout, cluster, program)
    m, others = layout.micro_steps, layout.pipeline - 1
    parts = {part: m * seconds for part, seconds in stage.items()}
    for part, seconds in head.items():
        parts[part] = parts.get(part, 0.0) + m * seconds
    parts["pipeline"] = m * sends
    parts["bubble"] = others / layout.virtual * (sum(stage.values()) + sends)
    compute = sum(stage.values()) + sum(head.values())
    parts["data"] = _data(model, layout, cluster, program, compute)
    shared = layout.data * layout.sequence if layout.zero_stage else 1
    parts["optimizer"] = OPTIMIZER_TRAFFIC * rank_weights(model, layout, program) / shared / cluster.gpu.bandwidth
    nodes = max(1.0, layout.devices / cluster.per_node)
    parts["waiting"] = cluster.waiting * math.log2(nodes) * sum(parts.values())
    tokens = layout.rows * model.sequence_length
    return StepTime(parts, tokens, model.flops, layout.devices, cluster.gpu.peak)


def rank_weights(model: Transformer, layout: Layout, program: Program) -> float:
    """Elements of the largest stage, one device's part of it: embeddings lie with the first layers, the head with the
    last, a tied one on both ends."""
    layers = model.layers / layout.pipeline * model.layer_weights
    ends = model.embedding_weights + model.head_weights
    if layout.pipeline > 1:
        tied = model.head_weights or model.vocabulary_size * model.hidden_size
        ends = max(model.embedding_weights, tied)
    return layers / layout.tensor + ends / sharing_ends(layout, program)


def sharing_ends(layout: Layout, program: Program) -> int:
    """How many devices share embeddings and logits."""
    return layout.tensor if program.ends_shared else 1


def efficiency(rows: float, inputs: float, outputs: float, half: float) -> float:
    """The share of a large product's speed that one of these dimensions has: a half where one of them is `half`."""
    return 1 / (1 + half * (1 / rows + 1 / inputs + 1 / outputs))


def product_seconds(rows: float, inputs: float, outputs: float, cluster: Cluster) -> float:
    """The time of (rows, inputs) x (inputs, outputs): 2 operations for each combination."""
    speed = cluster.gpu.peak * cluster.gpu.products * efficiency(rows, inputs, outputs, cluster.half)
    return 2 * rows * inputs * outputs / speed


def ring_seconds(size: float, members: int, cluster: Cluster, stride: int = 1, *, passes: int = 2) -> float:
    """The time in which a ring of `members` sums `size` bytes and tells all: each sends 2 (n - 1) / n of them; with 1
    of `passes` only the sum's parts, or only the telling."""
    if members == 1:
        return 0.0
    speed, latency = cluster.group(members, stride)
    return passes * ((members - 1) / members * size / speed + latency * math.log2(members))


def _tokens(model: Transformer, layout: Layout) -> float:
    """Of a micro-batch, on each device."""
    return layout.micro_batch_size * model.sequence_length / layout.sequence


def _layer(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> dict[str, float]:
    """Seconds of one layer for one micro-batch, forward and backward."""
    tokens, t = _tokens(model, layout), layout.tensor
    products = 0.0
    for inputs, outputs in model.products:
        wide = max(inputs, outputs)
        narrow = inputs * outputs / wide
        products += product_seconds(tokens, narrow, wide / t, cluster)
    attention = model.attention_flops * tokens / t / (cluster.gpu.peak * cluster.gpu.attention)
    own = LAYER_TRAFFIC * model.hidden_size / (t if layout.norms_shared else 1) + model.feed_forward_traffic / t
    scores = 0.0 if program.flash else model.scores_traffic / t
    passed = tokens * cluster.passes * (0.5 if program.fused else 1.0) / cluster.gpu.bandwidth
    traffic = (own + scores) * passed
    reduced = ring_seconds(LOWER * tokens * model.hidden_size, t, cluster)
    again = _again(layout, program, products, attention, own * passed, scores * passed)
    times = 6 if layout.recomputation == "full" else 4
    return {
        "products": products * (1 + BACKWARD),
        "attention": attention * (1 + ATTENTION_BACKWARD),
        "memory traffic": traffic * (1 + BACKWARD),
        "again": again,
        "tensor": times * reduced * (1 - program.overlaps_tensor),
        "sequence": 2 * _exchanges(model, layout, cluster),
    }


def _again(layout: Layout, program: Program, products: float, attention: float, own: float, scores: float) -> float:
    """Seconds of the forward that a backward computes again."""
    if layout.recomputation is None:
        return 0.0
    if layout.recomputation == "full":
        return products + attention + own + scores
    return (
        program.again_products * products + program.again_attention * (attention + scores) + program.again_traffic * own
    )


def _exchanges(model: Transformer, layout: Layout, cluster: Cluster) -> float:
    """Seconds in which Ulysses (Jacobs et al., 2023, arXiv:2309.14509) turns rows into heads and back: queries, keys,
    values and what comes out, each device sending (n - 1) / n of its part."""
    n = layout.sequence
    if n == 1:
        return 0.0
    speed, latency = cluster.group(n, layout.tensor)
    size = LOWER * _tokens(model, layout) * model.attention_width / layout.tensor
    return 4 * ((n - 1) / n * size / speed + latency)


def _head(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> dict[str, float]:
    """Seconds of logits and loss for one micro-batch, forward and backward."""
    tokens, outputs = _tokens(model, layout), model.vocabulary_size / sharing_ends(layout, program)
    products = product_seconds(tokens, model.hidden_size, outputs, cluster) * (1 + BACKWARD)
    passed = cluster.passes * (0.5 if program.fused else 1.0) / cluster.gpu.bandwidth
    traffic = LOGITS_TRAFFIC * tokens * outputs * passed
    return {"products": products, "memory traffic": traffic}


def _sends(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> float:
    """Seconds in which a stage hands on a micro-batch and gets its gradient: whole hidden states, from each of its
    `virtual` pieces."""
    if layout.pipeline == 1:
        return 0.0
    if layout.stages_near:
        inside = layout.tensor * layout.pipeline <= cluster.per_node
    else:
        inside = layout.tensor * layout.sequence * layout.data * 2 <= cluster.per_node
    speed, latency = cluster.group(2, 1 if inside else cluster.per_node)
    size = (program.travels or LOWER / layout.tensor) * _tokens(model, layout) * model.hidden_size
    return 2 * layout.virtual * (size / speed + latency)


def _data(model: Transformer, layout: Layout, cluster: Cluster, program: Program, compute: float) -> float:
    """Seconds that gradients and weights take on their way, as far as `compute` seconds of a micro-batch hide none.

    Stage 0 and 1 send gradients beside the last backward, 2 beside each; 1 and 2 gather weights after the step; 3
    gathers them for each forward and each backward and sends gradients beside each.
    """
    members = layout.data * layout.sequence
    if members == 1:
        return 0.0
    weights = rank_weights(model, layout, program)

    def once(element: float) -> float:
        stride = layout.tensor * (layout.pipeline if layout.stages_near else 1)
        return ring_seconds(element * weights, members, cluster, stride, passes=1)

    backward = compute * BACKWARD / (1 + BACKWARD)
    reduce, gather = once(program.reduced), once(program.gathered)
    stage, m = layout.zero_stage, layout.micro_steps
    if stage == 0:
        return _exposed(2 * reduce, backward, cluster)
    if stage == 1:
        return _exposed(reduce, backward, cluster) + gather
    if stage == 2:
        return m * _exposed(reduce, backward, cluster) + gather
    return m * _exposed(2 * gather + reduce, compute, cluster)


def _exposed(communication: float, compute: float, cluster: Cluster) -> float:
    """What `communication` beside `compute` adds to it: what outlasts it, and a share of the rest."""
    return max(0.0, communication - compute) + cluster.exposed * min(communication, compute)
