"""Formulas for the time of an optimizer step on many devices: products, memory traffic, communication, bubble.

Each function explains its own term. Not included: kernel launches, which matter for small models only, reading data,
logging, checkpoints, and devices that are slower than others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from terakoya_clusters.layouts.cluster import Cluster, Layout, Program
from terakoya_clusters.layouts.transformer import LAYER_TRAFFIC, LOGITS_TRAFFIC, Transformer

BACKWARD = 2.0
"""Time of the backward's products and traffic, as a multiple of the forward's."""
ATTENTION_BACKWARD = 2.5
"""The same for attention, whose backward recomputes the scores."""
OPTIMIZER_TRAFFIC = 36
"""Bytes per element that a step of AdamW in float32 moves: it reads weight, gradient and two moments, writes three of
them, computes the gradient norm and clears gradients."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by cause, none counted twice.

    Attributes:
        parts: products, attention, memory traffic, again (the same three for what a backward recomputes), tensor,
            sequence, pipeline and data communication that is not hidden, bubble, optimizer, waiting.
        tokens: tokens of a step on all devices.
        flops: necessary operations of a token, without recomputation.
        devices: number of devices.
        peak: FLOP/s of one device.
    """

    parts: Mapping[str, float]
    tokens: int
    flops: float
    devices: int
    peak: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """TFLOP/s of a device."""
        return self.flops * self.tokens_per_second / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the fraction of the peak that necessary operations take."""
        return self.tflops * 1e12 / self.peak


def step_time(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> StepTime:
    """Returns the time of one step of `model` in this `layout`.

    A pipeline's stages hold equally many layers, the last one also the head. Each micro-batch takes as long as the
    slowest stage, and the first one has to pass through all others, or with `virtual` stages on each device through a
    part of them (Narayanan et al., 2021, arXiv:2104.04473, section 2.2): m t_max + (sum of the others) / v, which is
    (m + (p - 1) / v) t for equal stages.
    """
    stage = {
        part: seconds * model.layers / layout.pipeline
        for part, seconds in _layer(model, layout, cluster, program).items()
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
    shards = layout.shards if layout.zero_stage else 1
    parts["optimizer"] = OPTIMIZER_TRAFFIC * rank_weights(model, layout) / shards / cluster.gpu.bandwidth
    nodes = max(1.0, layout.devices / cluster.per_node)
    parts["waiting"] = cluster.straggler_fraction * math.log2(nodes) * sum(parts.values())
    tokens = layout.rows * model.sequence_length
    return StepTime(parts, tokens, model.flops, layout.devices, cluster.gpu.peak)


def rank_weights(model: Transformer, layout: Layout) -> float:
    """Elements of one device's part of the largest stage: embeddings are on the first stage, the head is on the last, a
    tied matrix on both. Tensor-parallel devices divide all of it."""
    layers = model.layers / layout.pipeline * model.layer_weights
    ends = model.embedding_weights + model.head_weights
    if layout.pipeline > 1:
        tied = model.head_weights or model.vocabulary_size * model.hidden_size
        ends = max(model.embedding_weights, tied)
    return (layers + ends) / layout.tensor


def efficiency(rows: float, inputs: float, outputs: float, half: float) -> float:
    """Speed of a product of these dimensions as a fraction of a large product's: a half if one of them is `half`."""
    return 1 / (1 + half * (1 / rows + 1 / inputs + 1 / outputs))


def product_seconds(rows: float, inputs: float, outputs: float, cluster: Cluster) -> float:
    """Seconds of (rows, inputs) x (inputs, outputs): 2 operations for each combination."""
    speed = cluster.gpu.peak * cluster.gpu.products * efficiency(rows, inputs, outputs, cluster.half_speed_size)
    return 2 * rows * inputs * outputs / speed


def ring_seconds(size: float, members: int, cluster: Cluster, stride: int = 1, *, passes: int = 2) -> float:
    """Seconds of an all-reduce of `size` bytes in a ring of `members`: each sends 2 (n - 1) / n of them; with `passes`
    1 of a reduce-scatter or an all-gather alone."""
    if members == 1:
        return 0.0
    speed, latency = cluster.group(members, stride)
    return passes * ((members - 1) / members * size / speed + latency * math.log2(members))


def _tokens(model: Transformer, layout: Layout) -> float:
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
    attention *= _most_attention(model, layout)
    pointwise = LAYER_TRAFFIC * model.hidden_size / (t if layout.norms_shared else 1) + model.feed_forward_traffic / t
    scores = 0.0 if program.flash else model.scores_traffic / t
    seconds_per_byte = tokens * cluster.traffic_factor * (0.5 if program.fused else 1.0) / cluster.gpu.bandwidth
    traffic = (pointwise + scores) * seconds_per_byte
    recomputed = _recomputation_seconds(
        layout, program, products, attention, pointwise * seconds_per_byte, scores * seconds_per_byte
    )
    return {
        "products": products * (1 + BACKWARD),
        "attention": attention * (1 + ATTENTION_BACKWARD),
        "memory traffic": traffic * (1 + BACKWARD),
        "again": recomputed,
        "tensor": _regions(model, layout, cluster, program) * (1 - program.tensor_overlap),
        "sequence": _exchanges(model, layout, cluster, program),
    }


def _regions(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> float:
    """Seconds in which tensor-parallel devices communicate around the regions of a layer: attention and feed-forward.

    They all-reduce what leaves a region in the forward, and the gradient of what enters it in the backward. Where they
    share norms, they gather what enters, reduce-scatter what leaves, and do the reverse with gradients, which is as
    many passes of a ring. In this program these begin and end between the first block and the last one, at the price of
    a gather in the forward and one in the backward.
    """
    elements = _tokens(model, layout) * model.hidden_size
    leave, enter = (
        ring_seconds(size * elements, layout.tensor, cluster, passes=1) for size in (program.computed, program.entering)
    )
    repeated = {None: 0, "selective": program.recomputed_reductions, "full": 2}[layout.recomputation]
    seconds = 4 * (leave + enter)
    if not layout.norms_shared:
        return seconds + repeated * 2 * leave
    if program.gathers_again:
        seconds += 2 * leave + 2 * enter * layout.pipeline * layout.virtual / model.layers
    return seconds + repeated * leave + (2 * enter if repeated else 0.0)


def _most_attention(model: Transformer, layout: Layout) -> float:
    """The attention of the device with most of it, as a multiple of their mean. Devices that gather keys have their
    positions in order: of a row that is one causal document the last of n attends for (2 n - 1) / n times the mean."""
    if not layout.keys_gathered or not model.causal:
        return 1.0
    return 1 + (layout.sequence - 1) / layout.sequence * min(1.0, 2 * model.context / model.sequence_length)


def _recomputation_seconds(
    layout: Layout, program: Program, products: float, attention: float, pointwise: float, scores: float
) -> float:
    if layout.recomputation is None:
        return 0.0
    if layout.recomputation == "full":
        return products + attention + pointwise + scores
    return (
        program.recomputed_products * products
        + program.recomputed_attention * (attention + scores)
        + program.recomputed_traffic * pointwise
    )


def _exchanges(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> float:
    """Seconds in which sequence-parallel devices communicate in a layer's attention, forward and backward.

    Ulysses (Jacobs et al., 2023, arXiv:2309.14509) exchanges positions for heads and back: queries, keys, values and
    the output; each device sends (n - 1) / n of its part. Context parallelism all-gathers keys and values, and
    reduce-scatters their gradients. A backward that recomputes does either once more.
    """
    n = layout.sequence
    if n == 1:
        return 0.0
    element = program.computed * _tokens(model, layout) / layout.tensor
    passes = 2 if layout.recomputation is None else 3
    if layout.keys_gathered:
        return ring_seconds(element * n * 2 * model.keys_width, n, cluster, layout.tensor, passes=passes)
    speed, latency = cluster.group(n, layout.tensor)
    return passes * 4 * ((n - 1) / n * element * model.attention_width / speed + latency)


def _head(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> dict[str, float]:
    """Seconds of logits and loss for one micro-batch, forward and backward. Not included: the two reductions of
    tensor-parallel devices that divide the vocabulary, next to four in each layer."""
    tokens, outputs = _tokens(model, layout), model.vocabulary_size / layout.tensor
    products = product_seconds(tokens, model.hidden_size, outputs, cluster) * (1 + BACKWARD) * model.head_share
    seconds_per_byte = cluster.traffic_factor * (0.5 if program.fused else 1.0) / cluster.gpu.bandwidth
    traffic = LOGITS_TRAFFIC * tokens * outputs * seconds_per_byte * model.head_share
    return {"products": products, "memory traffic": traffic}


def _sends(model: Transformer, layout: Layout, cluster: Cluster, program: Program) -> float:
    """Seconds in which a device sends a micro-batch's hidden states on and receives their gradient, for each of its
    `virtual` stages."""
    if layout.pipeline == 1:
        return 0.0
    if layout.stages_near:
        inside = layout.tensor * layout.pipeline <= cluster.per_node
    else:
        inside = layout.tensor * layout.sequence * layout.data * 2 <= cluster.per_node
    speed, latency = cluster.group(2, 1 if inside else cluster.per_node)
    size = (program.hidden or program.computed / layout.tensor) * _tokens(model, layout) * model.hidden_size
    return 2 * layout.virtual * (size / speed + latency)


def _data(model: Transformer, layout: Layout, cluster: Cluster, program: Program, compute: float) -> float:
    """Seconds of communication of gradients and weights that `compute` seconds of a micro-batch do not hide.

    Stages 0 and 1 reduce gradients during the last backward, 2 and 3 during each; 1 and 2 gather weights after the
    step, 3 during each forward and each backward. Where groups of devices shard weights among themselves, the groups
    add up their gradients during the last backward.
    """
    members = layout.data * layout.sequence
    if members == 1:
        return 0.0
    weights = rank_weights(model, layout)

    shards = layout.shards
    stride = layout.tensor * (layout.pipeline if layout.stages_near else 1)

    def ring_pass(element: float) -> float:
        return ring_seconds(element * weights, shards, cluster, stride, passes=1)

    backward = compute * BACKWARD / (1 + BACKWARD)
    reduce, gather = ring_pass(program.reduced), ring_pass(program.gathered)
    stage, m = layout.zero_stage, layout.micro_steps
    if stage == 0:
        return _exposed_seconds(2 * reduce, backward, cluster)
    if stage == 1:
        return _exposed_seconds(reduce, backward, cluster) + gather
    if stage == 2:
        return m * _exposed_seconds(reduce, backward, cluster) + gather
    between = ring_seconds(program.reduced * weights / shards, members // shards, cluster, stride * shards)
    once = 2 * gather + reduce
    return (m - 1) * _exposed_seconds(once, compute, cluster) + _exposed_seconds(once + between, compute, cluster)


def _exposed_seconds(communication: float, compute: float, cluster: Cluster) -> float:
    """Seconds that `communication` adds to simultaneous `compute`: what lasts longer, and a fraction of the rest."""
    return max(0.0, communication - compute) + cluster.exposed_fraction * min(communication, compute)
