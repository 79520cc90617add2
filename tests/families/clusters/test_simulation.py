"""The formulas of time and memory on many GPUs, against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from tool_modules import load_tool

from terakoya.errors import UserError
from terakoya_clusters.layouts.cluster import Cluster, Gpu, Layout, Program, find_gpu
from terakoya_clusters.layouts.rank_memory import activations, in_flight, rank_memory
from terakoya_clusters.layouts.step_time import efficiency, rank_weights, ring_seconds, step_time
from terakoya_clusters.layouts.suggest import engine_program
from terakoya_clusters.layouts.transformer import Transformer

decoder = load_tool("simulation/decoder").decoder
H, L, V, S, A = 1024, 8, 32000, 2048, 16
"""Hidden size, layers, vocabulary, positions of a row, heads."""
DEVICE = Gpu("made up", 1e15, 0.5, 0.25, 80 * 2**30, 2e12, 4e11, 5e10)
LAYER = 12 * H * H
"""Elements of a layer's matrices."""
EASY = Cluster(DEVICE, 1, half_speed_size=0.0, traffic_factor=1.0, exposed_fraction=0.0, straggler_fraction=0.0)
"""Every product at full speed, all communication hidden, no waiting."""
PLAIN = Program()


def model(**changes: object) -> Transformer:
    made: Transformer = decoder(layers=L, hidden_size=H, heads=A, vocabulary_size=V, sequence_length=S, **changes)
    return made


def test_a_gpt_has_the_weights_and_operations_of_the_textbook() -> None:
    gpt = model()
    assert gpt.layer_weights == LAYER + 2 * H
    assert gpt.parameters == L * (LAYER + 2 * H) + (V + S) * H
    assert gpt.flops == pytest.approx(6 * (L * LAYER + V * H) + 12 * L * H * S / 2)
    llama = decoder(
        layers=32, hidden_size=4096, heads=32, key_value_heads=8, feed_forward=14336, gated=True, tied=False,
        positions=False, vocabulary_size=128256, sequence_length=8192,
    )  # fmt: skip
    assert llama.parameters == pytest.approx(8.03e9, rel=0.001)  # Llama 3 8B


def test_one_gpu_takes_the_time_of_its_products_attention_and_traffic() -> None:
    time = step_time(model(), Layout(micro_batch_size=2, micro_steps=3), EASY, PLAIN)
    tokens = 2 * S
    products = 6 * (L * LAYER + V * H) * tokens / (1e15 * 0.5)
    attention = 3.5 * L * 4 * (S / 2) * H * tokens / (1e15 * 0.25)
    traffic = 3 * L * (36 * H + 4 * 4 * H) * tokens / 2e12 + 30 * V * tokens / 2e12
    assert time.parts["products"] == pytest.approx(3 * products)
    assert time.parts["attention"] == pytest.approx(3 * attention)
    assert time.parts["memory traffic"] == pytest.approx(3 * traffic)
    assert time.parts["optimizer"] == pytest.approx(36 * model().parameters / 2e12)
    for part in ("tensor", "sequence", "pipeline", "bubble", "data", "again", "waiting"):
        assert time.parts[part] == 0, part
    assert time.tokens_per_second == pytest.approx(3 * tokens / time.seconds)
    assert time.mfu == pytest.approx(model().flops * 3 * tokens / time.seconds / 1e15)


def test_narrow_products_are_slower() -> None:
    assert efficiency(100, 100, 100, 0.0) == 1
    assert efficiency(1e9, 64, 1e9, 64.0) == pytest.approx(0.5)
    slow = step_time(model(), Layout(), replace(EASY, half_speed_size=H / 2), PLAIN).parts["products"]
    assert slow > 1.8 * step_time(model(), Layout(), EASY, PLAIN).parts["products"]


def test_a_ring_sends_two_passes_of_all_but_one_part() -> None:
    cluster = Cluster(DEVICE, 16)
    within = 2 * (7 / 8 * 1e9 / 4e11 + 5e-6 * 3)  # log2 8 = 3
    assert ring_seconds(1e9, 8, cluster) == pytest.approx(within)
    # two nodes of 8: the slowest link is the node's 8 adapters together, or NVLink where that is slower
    assert ring_seconds(1e9, 16, cluster) == pytest.approx(2 * (15 / 16 * 1e9 / 4e11 + 20e-6 * 4))
    # replicas at a distance of 8: one on each node, with one adapter
    assert ring_seconds(1e9, 2, cluster, stride=8) == pytest.approx(2 * (1 / 2 * 1e9 / 5e10 + 20e-6))
    assert ring_seconds(1e9, 1, cluster) == 0


def test_tensor_parallelism_reduces_four_times_a_layer_and_six_with_full_recomputation() -> None:
    layout = Layout(tensor=4, micro_batch_size=2)
    cluster = replace(EASY, gpus=4)
    one = 2 * (3 / 4 * 2 * 2 * S * H / 4e11 + 5e-6 * 2)  # bytes of (2 S, H) in 16 bits
    time = step_time(model(), layout, cluster, PLAIN)
    assert time.parts["tensor"] == pytest.approx(4 * L * one)
    alone = step_time(model(), Layout(micro_batch_size=2), EASY, PLAIN)
    assert time.parts["products"] == pytest.approx(alone.parts["products"] / 4)
    again = step_time(model(), layout.replace(recomputation="full"), cluster, PLAIN)
    assert again.parts["tensor"] == pytest.approx(6 * L * one)
    forward = L * (2 * LAYER * 2 * S / 4 / 5e14 + 4 * S / 2 * H * 2 * S / 4 / 2.5e14)
    traffic = L * (36 * H + 16 * H / 4) * 2 * S / 2e12
    assert again.parts["again"] == pytest.approx(forward + traffic)


def test_sequence_parallelism_sends_as_much_and_gathers_again_in_the_backward() -> None:
    """This program gathers what enters a region in float32, and its own positions of it once more in 16 bits."""
    program = engine_program({"engine": "ddp", "tp_size": 4}, model(), 8.0, "bf16")
    cluster, layout = replace(EASY, gpus=4), Layout(tensor=4, micro_batch_size=2)

    def sent(elements: float, messages: int) -> float:
        return 3 / 4 * elements * 2 * S * H / 4e11 + messages * 5e-6 * 2

    def found(layout: Layout, program: Program = program) -> float:
        return step_time(model(), layout, cluster, program).parts["tensor"] / L

    shared = layout.replace(norms_shared=True)
    # two all-reduces of 16 bits in the forward, of float32 in the backward; a gather or a scatter is half of one
    assert found(layout) == pytest.approx(sent(4 * 2 + 4 * 4, 8))
    ends = 2 / L  # before the first layer and after the last one
    assert found(shared) == pytest.approx(sent(4 * 2 + 4 * 4 + 2 * 2 + ends * 4, 8 + 2 + ends))
    assert found(shared, PLAIN) == found(layout, PLAIN), "others hide the second gather"
    again = "selective"  # one all-reduce, or a scatter and two gathers
    assert found(layout.replace(recomputation=again)) - found(layout) == pytest.approx(sent(2 * 2, 2))
    assert found(shared.replace(recomputation=again)) - found(shared) == pytest.approx(sent(2 + 2 * 4, 3))


def test_context_parallelism_gathers_keys_and_values_in_each_layer() -> None:
    cluster, gpt = replace(EASY, gpus=4), replace(model(), key_value_heads=4)
    layout = Layout(sequence=4, keys_gathered=True, micro_batch_size=2)
    keys = 2 * H / 4  # both, of four heads
    once = 3 / 4 * 2 * 2 * S * keys / 4e11 + 5e-6 * 2
    time = step_time(gpt, layout, cluster, PLAIN)
    assert time.parts["sequence"] == pytest.approx(L * 2 * once)
    again = step_time(gpt, layout.replace(recomputation="selective"), cluster, PLAIN)
    assert again.parts["sequence"] == pytest.approx(L * 3 * once)
    heads = step_time(gpt, layout.replace(keys_gathered=False), cluster, PLAIN)
    assert time.parts["products"] == heads.parts["products"]
    # the last of four devices attends to all four quarters, half of its own: 3.5 of 8
    assert time.parts["attention"] == pytest.approx(3.5 / 2 * heads.parts["attention"])
    whole = step_time(replace(gpt, causal=False, context=S), layout, cluster, PLAIN).parts["attention"]
    assert whole == pytest.approx(2 * heads.parts["attention"]), "without an order all have the same"

    memory = rank_memory(gpt, layout, PLAIN)["activations"]
    assert memory == pytest.approx((34 * H + 4 * 2 * keys) * 2 * S / 4 * L)
    full = rank_memory(gpt, layout.replace(recomputation="full"), PLAIN)["activations"]
    assert full == pytest.approx((2 * H * L + 34 * H + 4 * 2 * keys) * 2 * S / 4)


@pytest.mark.parametrize(("stages", "pieces", "micro_steps"), [(4, 1, 12), (4, 2, 12), (8, 1, 8)])
def test_a_pipeline_waits_for_its_stages(stages: int, pieces: int, micro_steps: int) -> None:
    headless = replace(model(), vocabulary_size=1)
    layout = Layout(pipeline=stages, virtual=pieces, micro_steps=micro_steps, stages_near=True)
    time = step_time(headless, layout, replace(EASY, gpus=stages), PLAIN)
    work = sum(time.parts[part] for part in ("products", "attention", "memory traffic", "pipeline"))
    assert time.parts["bubble"] / work == pytest.approx((stages - 1) / pieces / micro_steps, rel=1e-3)
    assert time.parts["bubble"] / (work + time.parts["bubble"]) == pytest.approx(
        (stages - 1) / (pieces * micro_steps + stages - 1), rel=1e-3
    )
    sent = 2 * S * H / 4e11 + 5e-6
    assert time.parts["pipeline"] == pytest.approx(micro_steps * 2 * pieces * sent)


def test_a_last_stage_with_a_head_slows_the_pipeline() -> None:
    layout = Layout(pipeline=4, micro_steps=6, stages_near=True)
    time = step_time(model(), layout, replace(EASY, gpus=4), PLAIN)
    stage = 6 * L / 4 * LAYER * S / 5e14
    head = 6 * V * H * S / 5e14
    assert time.parts["products"] == pytest.approx(6 * (stage + head))
    assert time.parts["bubble"] < 3 * (stage + head)


def test_communication_by_the_stage_of_zero() -> None:
    cluster = replace(EASY, gpus=8, exposed_fraction=1.0)
    weights = model().parameters
    once = 7 / 8 * 4 * weights / 4e11 + 5e-6 * 3
    sent = {
        stage: step_time(model(), Layout(data=8, zero_stage=stage, micro_steps=3), cluster, PLAIN).parts["data"]
        for stage in range(4)
    }
    assert sent[0] == pytest.approx(2 * once)
    assert sent[1] == pytest.approx(2 * once)
    assert sent[2] == pytest.approx(3 * once + once)
    assert sent[3] == pytest.approx(3 * 3 * once)
    hidden = step_time(model(), Layout(data=8, micro_steps=3), replace(EASY, gpus=8), PLAIN).parts["data"]
    assert hidden < 2 * once


def test_memory_by_the_stage_of_zero() -> None:
    weights = model().parameters

    def parts(stage: int, micro_steps: int = 1) -> list[float]:
        found = rank_memory(model(), Layout(data=4, zero_stage=stage, micro_steps=micro_steps), PLAIN)
        return [found[name] / weights for name in ("weights", "gradients", "optimizer")]

    assert parts(0) == [4, 4, 8]
    assert parts(1) == parts(1, micro_steps=2) == [4, 4, 2]
    assert parts(2, micro_steps=2) == [4, 1, 2]
    assert parts(3) == [1, 1, 2]
    copied = rank_memory(model(), Layout(data=4, zero_stage=1), replace(PLAIN, partition=4))
    assert copied["weights"] == 5 * weights


def test_activations_are_those_of_korthikanti() -> None:
    scores = 5 * A * S / H
    plain = model(flash=False)
    assert plain.activations == {None: (34 + scores) * H, "selective": 34 * H, "full": 2 * H}
    assert model().activations[None] == 34 * H
    assert activations(plain, Layout(tensor=8, recomputation="selective")) == pytest.approx((10 + 24 / 8) * H)
    assert activations(plain, Layout(tensor=8, norms_shared=True)) == pytest.approx((34 + scores) * H / 8)
    assert activations(plain, Layout(tensor=8, recomputation="full")) == 2 * H
    headless = replace(model(), head_activations=0.0)
    first = rank_memory(headless, Layout(pipeline=4, micro_steps=9, micro_batch_size=2), PLAIN)
    assert first["activations"] == pytest.approx(4 * 34 * H * 2 * S * L / 4)
    last = rank_memory(model(), Layout(micro_batch_size=2), PLAIN)
    assert last["activations"] == pytest.approx(34 * H * 2 * S * L)
    assert last["logits"] == pytest.approx((4 * H + 14 * V) * 2 * S)


def test_engines_of_this_program_keep_more() -> None:
    layer, ends = model().layer_weights, (V + S) * H

    def found(parallel: dict[str, object], precision: str = "fp32", **axes: int) -> Mapping[str, float]:
        program = engine_program(parallel, model(), 8.0, precision)
        return rank_memory(model(), Layout(**axes), program)  # type: ignore[arg-type]

    ddp = {"engine": "ddp"}
    assert found(ddp) == found(ddp, data=2), "DDP's buckets are the gradients' own memory"
    assert found(ddp, sequence=2)["communication"] == 0

    axes = {"pipeline": 4, "virtual": 2, "micro_steps": 8, "micro_batch_size": 3}
    hidden = 4 * H * 3 * S
    for replicas in (1, 2):  # a pipeline reduces gradients without DDP
        assert found(ddp, data=replicas, **axes)["communication"] == 2 * 3 * hidden, "one stage receives nothing"
    plain = rank_memory(replace(model(), head_activations=0.0), Layout(**axes), PLAIN)
    once, again = (
        step_time(model(), Layout(**axes), replace(EASY, gpus=4), replace(PLAIN, hidden=size)) for size in (0, 4)
    )
    assert again.parts["pipeline"] - once.parts["pipeline"] == pytest.approx(8 * 2 * 2 * (hidden / 2) / 4e11)
    sent = rank_memory(replace(model(), head_activations=0.0, backward=7.0), Layout(**axes), replace(PLAIN, hidden=4))
    assert sent["activations"] - plain["activations"] == pytest.approx(5.5 * 2 * hidden + 7 * 3 * S)

    shared = found(ddp, tensor=2)
    assert shared["weights"] == 4 * (L * layer + ends) / 2
    assert shared["logits"] == found(ddp)["logits"] / 2
    one, two = (step_time(model(), Layout(tensor=t), EASY, PLAIN) for t in (1, 2))
    assert two.parts["products"] == pytest.approx(one.parts["products"] / 2)

    cut = found({"engine": "fsdp"}, data=64, zero_stage=3)
    assert cut["gathered"] == 4 * (ends + 2 * layer) and cut["communication"] == 4 * (ends + layer)
    half = found({"engine": "fsdp"}, "bf16", data=64, zero_stage=3)
    assert half["gathered"] == 4 * ends + 2 * 2 * layer and half["communication"] == 4 * ends + (2 + 4) * layer


def test_hybrid_sharding_sends_weights_within_nodes_and_gradients_between_them_once() -> None:
    """Four nodes of eight: each GPU holds an eighth, and the nodes add up their gradients in the last backward."""
    easy = replace(EASY, gpus=32)
    weights = model().parameters
    whole, hybrid = (
        Layout(data=32, zero_stage=3, shard=shard, micro_steps=3, micro_batch_size=1) for shard in (None, 8)
    )
    shares = [rank_memory(model(), layout, PLAIN) for layout in (whole, hybrid)]
    for part in ("gradients", "optimizer", "weights"):
        assert shares[1][part] == pytest.approx(4 * shares[0][part]), part
    inside = 3 * ring_seconds(4 * weights, 8, easy, passes=1)
    between = ring_seconds(4 * weights / 8, 4, easy, 8)
    idle = replace(easy, exposed_fraction=1.0)  # nothing is hidden
    found = [step_time(model(), layout, idle, PLAIN).parts["data"] for layout in (whole, hybrid)]
    assert found[1] == pytest.approx(3 * inside + between)
    assert found[0] == pytest.approx(3 * 3 * ring_seconds(4 * weights, 32, easy, passes=1))


def test_micro_batches_in_flight() -> None:
    assert in_flight(Layout(pipeline=4, micro_steps=9)) == 4
    assert in_flight(Layout(pipeline=4, micro_steps=3)) == 3
    assert in_flight(Layout(pipeline=4, micro_steps=90, virtual=3)) == pytest.approx(4 * (1 + 3 / 12))


def test_a_stage_has_its_layers_and_embeddings_or_head() -> None:
    layers = L * model().layer_weights
    assert rank_weights(model(), Layout()) == model().parameters
    assert rank_weights(model(), Layout(pipeline=4)) == layers / 4 + (V + S) * H
    untied = model(tied=False, positions=False)
    assert rank_weights(untied, Layout(pipeline=4, tensor=2)) == (layers / 4 + V * H) / 2
    small = replace(model(), embedding_weights=0)  # the tied head is on the last stage all the same
    assert rank_weights(small, Layout(pipeline=4)) == layers / 4 + V * H


def test_each_doubling_of_nodes_adds_waiting() -> None:
    one = step_time(model(), Layout(data=8), Cluster(DEVICE, 8, straggler_fraction=0.01), PLAIN)
    four = step_time(model(), Layout(data=32), Cluster(DEVICE, 32, straggler_fraction=0.01), PLAIN)
    assert one.parts["waiting"] == 0
    rest = four.seconds - four.parts["waiting"]
    assert four.parts["waiting"] == pytest.approx(0.01 * math.log2(4) * rest)


def test_an_unknown_gpu_is_an_error() -> None:
    assert find_gpu("H100").memory == 80 * 2**30
    assert find_gpu("NVIDIA A100-SXM4-40GB").memory == 40 * 2**30 and find_gpu("NVIDIA H200").name == "h200"
    with pytest.raises(UserError, match="--gpu: expected"):
        find_gpu("NVIDIA H100 PCIe")
    with pytest.raises(UserError, match=r'--gpu: expected h100, .*, got "h10"; did you mean'):
        find_gpu("h10")
