"""Formulas for the memory of one device of many: weights, gradients and optimizer by the stage of ZeRO (Rajbhandari et
al., 2020, arXiv:1910.02054), activations by the micro-batches in flight (Korthikanti et al., 2022,
arXiv:2205.05198)."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya_clusters.layouts.cluster import Layout, Program
from terakoya_clusters.layouts.step_time import rank_weights
from terakoya_clusters.layouts.transformer import Transformer


def rank_memory(model: Transformer, layout: Layout, program: Program) -> Mapping[str, float]:
    """Bytes by part of the device that holds most, at its peak: the beginning of a backward, with whole gradients.

    With a pipeline that device runs the first stage, which has most micro-batches in flight, or the last, which has
    logits.
    """
    weights = rank_weights(model, layout)
    replicas, shards = layout.data * layout.sequence, layout.shards
    stage = layout.zero_stage
    whole = 1.0 if stage < 3 else 1 / shards
    copies = model.weight_copies if program.cast_weights else 0.0
    parts = {
        "weights": program.weights * weights * whole + copies * weights,
        # in stage 1 a device has all of them until they are reduced
        "gradients": program.gradients * weights / (shards if stage >= 2 else 1),
        "optimizer": program.optimizer * weights / (shards if stage else 1),
    }
    if stage:
        parts["weights"] += program.partition * weights / shards
    if stage == 3:
        layer = model.layer_weights / layout.tensor
        gathered = 2 * layer if program.max_gathered is None else program.max_gathered
        parts["gathered"] = program.gathered * min(gathered, weights)
    tokens = layout.micro_batch_size * model.sequence_length / layout.sequence
    hidden = program.hidden * model.hidden_size * tokens if layout.pipeline > 1 else 0.0
    # received and sent by each stage, in both directions
    parts["communication"] = 2 * hidden * (2 * layout.virtual - 1)
    if stage or replicas > 1:
        parts["communication"] += program.bucket
    first = in_flight(layout)
    of_layer = activations(model, layout) * tokens * model.layers / layout.pipeline + hidden * layout.virtual
    whole_keys, working = _whole_keys(model, layout, program) * tokens, 0.0
    if layout.recomputation is None:
        of_layer += whole_keys * model.layers / layout.pipeline
    else:
        working = whole_keys
    if layout.recomputation == "full":  # one layer's activations exist while its gradient is computed
        working += activations(model, layout.replace(recomputation=None)) * tokens
    logits, backward = model.head_activations * tokens / layout.tensor, model.backward * tokens
    if layout.pipeline == 1 or of_layer + logits > first * of_layer + backward:
        parts |= {"activations": of_layer + working, "logits": logits}
    else:
        parts["activations"] = first * of_layer + backward + working
    return parts


def activations(model: Transformer, layout: Layout) -> float:
    """Bytes of a token in one layer on one device."""
    if layout.tensor == 1:
        return model.activations[layout.recomputation]
    whole, divided = (model.position_shares if layout.norms_shared else model.tensor_shares)[layout.recomputation]
    return whole + divided / layout.tensor


def _whole_keys(model: Transformer, layout: Layout, program: Program) -> float:
    """Bytes of gathered keys and values in one layer, for each token of a device's own. Its own are kept beside them
    where one product makes them with the queries, as these are parts of its result."""
    if not layout.keys_gathered:
        return 0.0
    return layout.sequence * 2 * program.computed * model.keys_width / layout.tensor


def in_flight(layout: Layout) -> float:
    """Micro-batches whose activations the first stage of a pipeline holds at once: one for each stage, if there are as
    many; with interleaving 1 + (p - 1) / (p v) times as many (Korthikanti et al., section 4.2.3)."""
    p, v = layout.pipeline, layout.virtual
    factor = 1 + (p - 1) / (p * v) if v > 1 else 1.0
    return min(p * factor, float(layout.micro_steps))
