"""Memory of one device of many, by formula: weights, gradients and optimizer by the stage of ZeRO (Rajbhandari et al.,
2020, arXiv:1910.02054), activations by what a pipeline has in flight (Korthikanti et al., 2022, arXiv:2205.05198)."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya.estimation.layouts.cluster import Layout, Program
from terakoya.estimation.layouts.step_time import rank_weights, sharing_ends
from terakoya.estimation.layouts.transformer import Transformer


def rank_memory(model: Transformer, layout: Layout, program: Program) -> Mapping[str, float]:
    """Bytes by part of the device that holds most, when the most is live: a backward's beginning, its gradients there.

    With a pipeline that is the first stage, which has most micro-batches in flight, or the last, which has logits.
    """
    weights = rank_weights(model, layout, program)
    shared = layout.data * layout.sequence
    stage = layout.zero_stage
    whole = 1.0 if stage < 3 else 1 / shared
    parts = {
        "weights": program.weights * weights * whole + model.weight_copies * weights,
        "gradients": program.gradients * weights / (shared if _gradients_shared(layout) else 1),
        "optimizer": program.optimizer * weights / (shared if stage else 1),
    }
    if stage:
        parts["weights"] += program.partition * weights / shared
    if stage == 3:
        layer = model.layer_weights / layout.tensor
        live = 2 * layer if program.live is None else program.live
        parts["gathered"] = program.gathered * min(live, weights)
    tokens = layout.micro_batch_size * model.sequence_length / layout.sequence
    hidden = program.travels * model.hidden_size * tokens if layout.pipeline > 1 else 0.0
    parts["communication"] = 2 * hidden * (2 * layout.virtual - 1)  # received and sent by each piece, either way
    if stage or shared > 1:
        parts["communication"] += program.bucket
    first, last = in_flight(layout), 1.0
    of_layer = activations(model, layout) * tokens * model.layers / layout.pipeline + hidden * layout.virtual
    working = 0.0
    if layout.recomputation == "full":  # one layer is whole again while its gradient is computed
        working = activations(model, layout.changed(recomputation=None)) * tokens
    logits, backward = model.head_activations * tokens / sharing_ends(layout, program), model.backward * tokens
    if layout.pipeline == 1 or last * of_layer + logits > first * of_layer + backward:
        parts |= {"activations": last * of_layer + working, "logits": logits}
    else:
        parts["activations"] = first * of_layer + backward + working
    return parts


def activations(model: Transformer, layout: Layout) -> float:
    """Bytes of a token in one layer on one device: what tensor parallelism spreads by its size, norms and residuals too
    where they are shared."""
    whole = model.activations[layout.recomputation]
    if layout.norms_shared:
        return whole / layout.tensor
    if layout.recomputation == "full":  # a layer's input, which all have
        return whole
    return whole * (1 - model.activations_spread + model.activations_spread / layout.tensor)


def in_flight(layout: Layout) -> float:
    """Micro-batches whose activations the first stage of a pipeline holds at once: as many as there are stages, if it
    has them; interleaved by a factor of 1 + (p - 1) / (p v) more (Korthikanti et al., section 4.2.3)."""
    p, v = layout.pipeline, layout.virtual
    more = 1 + (p - 1) / (p * v) if v > 1 else 1.0
    return min(p * more, float(layout.micro_steps))


def _gradients_shared(layout: Layout) -> bool:
    """Whether a device keeps the gradients of its share alone: stage 1 has all of them until they are reduced."""
    return layout.zero_stage >= 2
