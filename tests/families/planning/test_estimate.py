"""`terakoya estimate`, and the rules of its counting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.config.parameters import Parameters
from terakoya.distributed.topology import RankBatch
from terakoya.errors import UserError
from terakoya_planning import devices
from terakoya_planning.devices import GIB, Device, find_device
from terakoya_planning.engine_memory import AHEAD, BUCKET, LIVE, Sharding, memory_per_process, offloaded_memory
from terakoya_planning.estimate import Estimate, estimate, first_rank_batch
from terakoya_planning.fake_step import LATE_BACKWARD, ModelSizes
from terakoya_planning.speed import Speed

PRESETS = Path(__file__).parents[3] / "parameters"
pytestmark = pytest.mark.usefixtures("remembered_steps")
VOCABULARY, HIDDEN, LAYERS, LENGTH = 5000, 256, 4, 256


def test_a_preset_is_estimated_without_its_stores_from_the_command_line() -> None:
    arguments = ["estimate", str(PRESETS / "tiny_gpt2.json"), "--vocab-size", str(VOCABULARY), "--processes", "8"]
    done = CliRunner().invoke(
        build_app(), [*arguments, "--device", "h100", "--mfu", "0.25", "--json", "--set", "micro_batch_size=2"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    weights = (VOCABULARY + LENGTH) * HIDDEN + LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + 2 * HIDDEN
    assert found["sizes"]["parameters"] == found["sizes"]["trained"] == weights
    assert found["sizes"]["embeddings"] == (VOCABULARY + LENGTH) * HIDDEN
    products = LAYERS * 12 * HIDDEN**2 + VOCABULARY * HIDDEN
    flops = 6 * products + 12 * LAYERS * HIDDEN * LENGTH / 2  # a position attends to half of the row, on average
    assert found["sizes"]["flops_per_token"] == pytest.approx(flops)
    assert found["tokens_per_step"] == 32 * LENGTH
    assert found["flops"] == pytest.approx(flops * 32 * LENGTH * 2000)
    steps = 2000 + (1 + 4) * 50 / 3  # five validations of 50 batches, each a third of a step
    hours = found["flops"] * steps / 2000 / (8 * 0.25 * 989e12) / 3600
    assert found["hours"] == pytest.approx([hours, hours]) and found["speed"]["source"] == "given"
    assert found["share"]["micro_batch_size"] == 2 and found["share"]["micro_steps"] == 2
    assert found["checkpoint"]["state"] == pytest.approx(3 * 4 * weights, rel=1e-3)
    assert found["disk"] == 4 * sum(found["checkpoint"].values())
    assert found["memory"]["parts"]["weights"] == 4 * weights
    assert found["memory"]["parts"]["gradients"] == 4 * weights  # DDP's buckets, which always exist
    assert found["memory"]["peak"] == sum(found["memory"]["parts"].values())
    assert found["memory"]["interpreter"] > 50e6


def test_a_moving_average_takes_as_much_as_the_weights() -> None:
    plain, averaged = (
        estimate(PRESETS / "tiny_gpt2.json", device="h100", vocab_size=VOCABULARY, overrides=overrides)
        for overrides in ((), ("events.ema.decay=0.9",))
    )
    assert averaged.memory.parts["event plugins"] == 4 * averaged.sizes.trained
    assert averaged.memory.peak - plain.memory.peak == 4 * plain.sizes.trained
    assert averaged.checkpoint["state"] - plain.checkpoint["state"] == 4 * plain.sizes.trained
    assert "event plugins" not in plain.memory.parts


def test_checkpoints_that_event_plugins_keep_are_counted_on_disk() -> None:
    found = estimate(
        PRESETS / "tiny_gpt2.json", device="h100", vocab_size=VOCABULARY,
        overrides=("max_steps=2000", "checkpoint.save_steps=100", "checkpoint.keep=3",
                   "events.permanent_checkpoints.every=300", "events.best_checkpoint.metric=loss"),
    )  # fmt: skip
    assert found.disk == (3 + 6 + 1 + 1) * sum(found.checkpoint.values())


def test_missing_stores_and_unknown_devices_are_errors() -> None:
    with pytest.raises(UserError, match=r"no store at work/store.*--vocab-size"):
        estimate(PRESETS / "tiny_gpt2.json")
    with pytest.raises(UserError, match='device "h10": not known; did you mean'):
        estimate(PRESETS / "tiny_gpt2.json", device="h10", vocab_size=5000)
    parameters = Parameters.load(PRESETS / "tiny_gpt2.json", ['batch_size={"0": 4, "1": 4}'])
    with pytest.raises(UserError, match="2 nodes"):
        first_rank_batch(parameters.batch_size, None, replica_size=1, processes=3)


@pytest.mark.parametrize(
    ("name", "gibibytes", "peak"),
    [
        ("h100", 80, 989.0),
        ("a100-80gb", 80, 312.0),
        ("a100-40gb", 40, 312.0),
        ("rtx-4090", 24, 165.2),
        ("l4", 24, 121.0),
    ],
)
def test_devices_have_a_memory_and_a_peak(name: str, gibibytes: int, peak: float) -> None:
    found = find_device(name)
    assert (found.memory, found.peak_tflops) == (gibibytes * GIB, peak)


def sizes(elements: int, **changes: Any) -> ModelSizes:
    """Sizes of a model of `elements`, all trained, two thirds of them in two blocks."""
    third = elements // 3
    facts = {
        "parameters": elements, "trained": elements, "embeddings": third, "blocks": 2 * third, "largest_block": third,
        "largest": elements // 4, "small": elements // 10, "flops_per_token": 1, "saved_bytes": 0, "model_bytes": 0,
    }  # fmt: skip
    return ModelSizes(**{**facts, **changes})


WINDOWS = {
    "forward": {"weights": 4000 + 80, "optimizer": 8000, "activations": 700},  # with 80 bytes of buffers
    LATE_BACKWARD: {"weights": 4000 + 80, "optimizer": 8000, "gradients": 3900, "activations": 100},
    "optimizer step": {"weights": 4000 + 80, "optimizer": 8000, "gradients": 4000},
}


@pytest.mark.parametrize("sharding", [Sharding(4, 2, micro_steps=1), Sharding(4, None, 1, fully_sharded=True)])
def test_the_owner_of_the_largest_whole_tensor_is_counted(sharding: Sharding) -> None:
    """It has half of the model, and a quarter of the 320 elements that are updated as shards."""
    found = memory_per_process(WINDOWS, sharding, sizes(1000, seen_whole=(60, 500, 60, 60)))
    shared = memory_per_process(WINDOWS, sharding, sizes(1000))
    assert found["forward"]["optimizer"] == 8 * (500 + 320 // 4) and shared["forward"]["optimizer"] == 8 * 250
    for name, added in (("forward", 0), ("optimizer step", 4 * 4 * 500)):
        assert found[name].get("communication", 0) == shared[name].get("communication", 0) + added


@pytest.mark.nightly
def test_what_an_optimizer_sees_whole_is_counted() -> None:
    parameters = Parameters.load(PRESETS / "tiny_gpt2.json", ["optimizer.type=muon"])
    found = estimate(parameters, vocab_size=5000).sizes
    assert 0 < sum(found.seen_whole) < found.trained, "the matrices of blocks"
    assert not estimate(Parameters.load(PRESETS / "tiny_gpt2.json", []), vocab_size=5000).sizes.seen_whole


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "communication", "at_rest"),
    [
        (0, 4000, 0, 0, (4000, 4000, 4000)),
        (1, 5000, 0, 0, (5000, 2000, 0)),
        (2, 5000, 0, 0, (5000, 2000, 0)),
        (
            3,
            2000 + 4000,
            1000,
            8000,
            (2000 + 400, 1000, 4000),
        ),  # its own part twice, and everything, or the small parameters
    ],
)
def test_each_stage_of_zero_shards_its_parts(
    stage: int, weights: int, gradients: int, communication: int, at_rest: tuple[int, int, int]
) -> None:
    found = memory_per_process(WINDOWS, Sharding(4, stage, micro_steps=1), sizes(1000))
    late = [found[LATE_BACKWARD].get(part, 0) for part in ("gradients", "communication")]
    if stage in (1, 2):  # whole and in the bucket, or in the bucket and in the copy that is sent
        assert late == ([3900, 4000] if stage == 1 else [0, 8000])
    forward, step = found["forward"], found["optimizer step"]
    assert forward["weights"] == weights + 80
    assert forward.get("gradients", 0) == gradients
    assert forward["optimizer"] == step["optimizer"] == (2000 if stage else 8000)
    assert forward.get("communication", 0) == communication  # the bucket, and in stage 3 prefetched weights
    assert forward["activations"] == 700
    assert (step["weights"] - 80, step["gradients"], step.get("communication", 0)) == at_rest


@pytest.mark.parametrize(
    ("micro_steps", "kept"),
    [
        (1, (30 + 4000 - 700, 30, 30)),  # most is allocated in the step, where all gradients are there
        (2, (30 + 4000 - 700, 30 + 3900, 30 + 4000)),  # gradients that are added up are outside of the graphs, too
    ],
)
def test_graphs_keep_what_a_micro_step_allocates_and_a_copy_of_its_batch(
    micro_steps: int, kept: tuple[int, int, int]
) -> None:
    windows = {name: {**parts, "batch": 30} for name, parts in WINDOWS.items()}
    for graphs in (True, False):
        found = memory_per_process(windows, Sharding(1, None, micro_steps, cuda_graphs=graphs), sizes(1000))
        expected = kept if graphs else (0, 0, 0)
        assert tuple(parts.get("kept by CUDA graphs", 0) for parts in found.values()) == expected


@pytest.mark.nightly
def test_a_card_without_room_for_graphs_is_estimated_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the run would go on there; a run that refuses to do without does not fit."""

    def found(memory: int, graphs: str) -> Estimate:
        monkeypatch.setattr(devices, "find_device", lambda name: Device(name, memory, 1000.0))
        return estimate(
            PRESETS / "tiny_gpt2.json", device="some", vocab_size=VOCABULARY, overrides=(f"cuda_graphs={graphs}",)
        )

    recorded, plain = found(80 * GIB, "true"), found(80 * GIB, "false")
    assert recorded.memory.peak > plain.memory.peak and found(80 * GIB, '"auto"').memory.parts == recorded.memory.parts
    between = (recorded.memory.peak + plain.memory.peak) // 2
    automatic = found(between, '"auto"')
    assert automatic.fits and automatic.memory.parts == plain.memory.parts
    needed = f"with CUDA graphs the tensors would take {recorded.memory.peak / 1e9:.2f} GB, so the run trains without"
    assert needed in automatic.notes and not found(between, "true").fits


@pytest.mark.parametrize(
    ("stage", "micro_steps", "offloaded", "device", "host"),
    [
        (1, 1, {"offload_optimizer"}, (4000, 3900, 4000 + 1000), (2000, 2000, 1000 + 1000)),  # with the largest weight
        (2, 1, {"offload_optimizer"}, (4000, 0, 8000 + 1000), (2000, 2000, 1000 + 1000)),
        (2, 2, {"offload_optimizer"}, (4000, 0, 8000 + 1000), (2000, 2000, 2000 + 1000)),
        (3, 1, {"offload_optimizer"}, (1000 + 4000, 0, 8000), (1000, 2000, 2000)),
        (3, 1, {"offload_param"}, (1000 + 4000, 1000, 8000), (1000, 0, 0)),
        (3, 1, {"offload_optimizer", "offload_param"}, (4000, 0, 8000), (2000, 2000, 2000)),
    ],
)
def test_offloaded_parts_are_on_the_host(
    stage: int, micro_steps: int, offloaded: set[str], device: tuple[int, int, int], host: tuple[int, int, int]
) -> None:
    sharding = Sharding(4, stage, micro_steps, offloaded=offloaded)
    late = memory_per_process(WINDOWS, sharding, sizes(1000))[LATE_BACKWARD]
    assert (late["weights"] - 80, late["gradients"], late["communication"]) == device
    assert late["optimizer"] == (0 if "offload_optimizer" in offloaded else 2000)
    found = offloaded_memory(WINDOWS, sharding, sizes(1000))
    assert tuple(found.get(part, 0) for part in ("weights", "optimizer", "gradients")) == host


def test_gradients_that_stage_1_accumulates_stay_on_the_device() -> None:
    accumulated = {name: {**parts, "gradients": 4000} for name, parts in WINDOWS.items()}
    found = memory_per_process(accumulated, Sharding(4, 1, 2, offloaded={"offload_optimizer"}), sizes(1000))
    assert (found["forward"]["gradients"], found["optimizer step"]["gradients"]) == (4000, 0)


@pytest.mark.nightly
def test_offloaded_memory_is_reported_separately() -> None:
    raw = json.loads((PRESETS / "tiny_gpt2.json").read_text())
    section = {"offload_optimizer": {"device": "cpu"}}

    def found(**parallel: Any) -> Estimate:
        engine = {"engine": "deepspeed", "zero_stage": 2, **parallel}
        settings = Parameters.from_dict({**raw, "parallel": engine}, source="test")
        return estimate(settings, processes=2, device="l4", vocab_size=8000)

    asked, plain = found(offload_optimizer_device="cpu"), found()
    written = found(deepspeed_config={"zero_optimization": section}).memory
    assert (written.parts, written.offloaded) == (asked.memory.parts, asked.memory.offloaded)
    assert set(asked.memory.offloaded) == {"weights", "optimizer", "gradients"} and not plain.memory.offloaded
    assert asked.memory.peak < plain.memory.peak
    both = asked.memory.peak + sum(asked.memory.offloaded.values())
    for name, memory, fits in (
        ("l4", both - 1, True),
        ("cpu", both - 1, False),
        ("cpu", both + 1, True),
        ("x", None, None),
    ):
        assert replace(asked, device=Device(name, memory, None)).fits is fits
    assert any("powers of two" in note for note in asked.notes)
    assert not any("powers of two" in note for note in plain.notes)


def test_zero_gathers_a_large_model_in_parts() -> None:
    elements = 3 * 10**9
    windows = {name: {"weights": 4 * elements, "optimizer": 8 * elements} for name in ("forward", LATE_BACKWARD)}
    held = sizes(elements)
    late = memory_per_process(windows, Sharding(2, 2, 1), held)[LATE_BACKWARD]
    assert (late["communication"], late["gradients"]) == (2 * 4 * BUCKET, 2 * elements)
    third = memory_per_process(windows, Sharding(2, 3, 1), held)["forward"]
    assert third["communication"] == 4 * (BUCKET + AHEAD)
    assert third["weights"] == 4 * (elements + LIVE)  # two halves, and the gathered part


def test_stage_1_keeps_whole_gradients_between_micro_steps() -> None:
    accumulated = {"forward": {**WINDOWS["forward"], "gradients": 4000}}
    sharding = Sharding(4, 1, micro_steps=2)
    assert memory_per_process(accumulated, sharding, sizes(1000))["forward"]["gradients"] == 4000
    assert sharding.gradients_stay and not Sharding(4, 2, micro_steps=2).gradients_stay
    assert not Sharding(4, 1, micro_steps=1).gradients_stay
    assert Sharding(2, None, micro_steps=1).gradients_stay and not Sharding(1, None, micro_steps=1).gradients_stay
    assert Sharding(1, None, micro_steps=2).gradients_stay
    assert not Sharding(2, None, micro_steps=2, fully_sharded=True).gradients_stay


def test_fsdp_holds_its_part_and_the_running_blocks() -> None:
    found = memory_per_process(
        WINDOWS, Sharding(4, None, micro_steps=1, fully_sharded=True), sizes(1200 - 300, parameters=900, trained=900)
    )
    forward, step = found["forward"], found["optimizer step"]
    assert forward["weights"] == (4080 - 3600) + 900 + 4 * (300 + 2 * 300)  # outside of blocks, and two blocks
    assert forward["communication"] == 4 * (300 + 300)
    assert (step["weights"], step["gradients"], step["optimizer"]) == (480 + 900, 900, 2000)
    windows = {name: {**parts, "weights in 16 bits": 600} for name, parts in WINDOWS.items()}
    half = memory_per_process(
        windows, Sharding(4, None, micro_steps=1, fully_sharded=True, gathered=2),
        sizes(1200 - 300, parameters=900, trained=900),
    )["forward"]  # fmt: skip
    assert half["weights"] == (4080 - 3600) + 900 + 4 * 300 + 2 * 2 * 300 and "weights in 16 bits" not in half
    assert half["communication"] == 4 * 300 + (2 + 4) * 300, "gradients of a block in 16 bits, and in float32 to send"
    stream = memory_per_process(
        windows, Sharding(4, None, micro_steps=1, fully_sharded=True, gathered=2, outside=2),
        sizes(1200 - 300, parameters=900, trained=900),
    )["forward"]  # fmt: skip
    assert stream["weights"] == (4080 - 3600) + 900 + 2 * (300 + 2 * 300) and "weights in 16 bits" not in stream
    assert stream["communication"] == 4 * (300 + 300), "gradients are float32 from the beginning"
    alone = memory_per_process(WINDOWS, Sharding(1, None, micro_steps=1), sizes(1000))
    assert alone == WINDOWS
    assert memory_per_process(WINDOWS, Sharding(2, None, micro_steps=1), sizes(1000)) == WINDOWS, (
        "DDP's buckets are the gradients"
    )


@pytest.mark.nightly
def test_a_run_is_estimated_with_its_own_engine() -> None:
    def found(parallel: dict[str, Any]) -> Estimate:
        raw = json.loads((PRESETS / "tiny_gpt2.json").read_text())
        parameters = Parameters.from_dict({**raw, "parallel": parallel}, source="test")
        return estimate(parameters, processes=2, device="h100", vocab_size=VOCABULARY)

    ddp, fsdp = found({"engine": "ddp"}), found({"engine": "fsdp"})
    tensor = found({"engine": "ddp", "tp_size": 2})
    assert (ddp.engine, fsdp.engine) == ("ddp", "fsdp")
    assert fsdp.memory.parts["optimizer"] == ddp.memory.parts["optimizer"] // 2
    assert tensor.share.micro_batch_size == 2 * ddp.share.micro_batch_size  # both have the same rows
    assert any("2 processes share" in note for note in tensor.notes) and not any("share" in n for n in ddp.notes)


def test_hours_follow_from_the_speed_of_the_device() -> None:
    def found(**said: Any) -> Estimate:
        return estimate(
            PRESETS / "tiny_gpt2.json", vocab_size=VOCABULARY, overrides=("evaluation=null", "precision=bf16"), **said
        )

    said = found(device="h100", tflops=98.9)
    assert said.hours == pytest.approx([said.flops / 98.9e12 / 3600] * 2)
    assert found(device="h100", mfu=0.1).hours == pytest.approx(said.hours)
    assert found(device="cpu").hours is None
    assert found(device="cpu", tflops=0.05).hours == pytest.approx([said.flops / 0.05e12 / 3600] * 2)
    with pytest.raises(UserError, match="--mfu: the peak of cpu is unknown"):
        found(device="cpu", mfu=0.4)


def test_a_device_that_is_here_is_measured_unless_its_speed_is_given() -> None:
    """Also in bf16 on a CPU, of which no card's peak says anything. Another device is never measured."""
    asked: list[tuple[str, int, int, int]] = []

    def measure(parameters: Parameters, vocab_size: int, share: RankBatch, processes: int) -> Speed:
        asked.append((parameters.precision, vocab_size, share.micro_batch_size, processes))
        return Speed(2.0, 2.0, 0.25, "probe", "as told")

    def found(**said: Any) -> Estimate:
        return estimate(PRESETS / "tiny_gpt2.json", vocab_size=VOCABULARY, measure_speed=measure, **said)

    here = found(device="cpu", overrides=("precision=bf16",))
    validations = 5 * 50  # global batches, each a quarter of a step
    assert here.hours == pytest.approx([(2000 + validations / 4) * 2 / 3600] * 2)
    assert asked == [("bf16", VOCABULARY, 32, 1)]
    assert found(device="h100").speed.source == "range" and found(device="cpu", tflops=1).speed.source == "given"
    assert len(asked) == 1


def test_the_output_says_whether_the_run_fits(tmp_path: Path) -> None:
    def said(*more: str) -> str:
        arguments = ["estimate", str(PRESETS / "tiny_gpt2.json"), "--vocab-size", "5000", "--device", "rtx-4090", *more]
        done = CliRunner().invoke(build_app(), arguments)
        assert done.exit_code == 0, done.output
        return done.output

    assert "fits into rtx-4090's 25.77 GB" in said()
    assert "does NOT fit into rtx-4090" in said("--set", 'batch_size={"-1": 4096}')
    assert "memory of each of 4 ranks (ddp)" in said("--processes", "4", "--set", 'batch_size={"-1": 8}')
    parallel = 'parallel={"engine": "deepspeed", "zero_stage": 2}'
    assert "ranks (ZeRO stage 2)" in said("--processes", "4", "--set", parallel)
    parallel = 'parallel={"engine": "deepspeed", "zero_stage": 1, "offload_optimizer_device": "cpu"}'
    assert "in addition, on the host: weights" in said("--set", parallel) and "offloaded" not in said()
    assert "pipeline stages: one; each rank runs all layers" in said()
    stages = ("--set", "parallel.pp_size=2", "--set", "parallel.pp_stages_per_process=2")
    two = said(*stages, "--set", 'batch_size={"a": 4, "b": 4, "c": 4}')
    assert (
        "memory of each of 6 ranks (ddp)" in two and "pipeline stages: 4" in two
    )  # three hosts with two processes each
