"""`terakoya estimate`, and the rules by which it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from terakoya.commands.main import app
from terakoya.errors import UserError
from terakoya.estimation.devices import GIB, device
from terakoya.estimation.estimate import estimate, share_of
from terakoya.estimation.sharing import BUCKET, World, shared
from terakoya.parameters import Parameters

PRESETS = Path(__file__).parents[2] / "parameters"
VOCABULARY, HIDDEN, LAYERS, LENGTH = 5000, 256, 4, 256


def test_a_preset_is_estimated_without_its_stores_from_the_command_line() -> None:
    arguments = ["estimate", str(PRESETS / "tiny_gpt2.json"), "--vocab-size", str(VOCABULARY), "--gpus", "8"]
    done = CliRunner().invoke(
        app, [*arguments, "--device", "h100", "--mfu", "0.25", "--json", "--set", "micro_batch_size=2"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    weights = (VOCABULARY + LENGTH) * HIDDEN + LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + 2 * HIDDEN
    assert found["sizes"]["parameters"] == found["sizes"]["trained"] == weights
    assert found["sizes"]["embeddings"] == (VOCABULARY + LENGTH) * HIDDEN
    products = LAYERS * 12 * HIDDEN**2 + VOCABULARY * HIDDEN
    flops = 6 * products + 12 * LAYERS * HIDDEN * LENGTH / 2  # half of the row is seen, on average
    assert found["sizes"]["flops_per_token"] == pytest.approx(flops)
    assert found["tokens_per_step"] == 32 * LENGTH
    assert found["flops"] == pytest.approx(flops * 32 * LENGTH * 2000)
    assert found["hours"] == pytest.approx(found["flops"] / (8 * 0.25 * 989e12) / 3600)
    assert found["share"]["micro_batch_size"] == 2 and found["share"]["micro_steps"] == 2
    assert found["checkpoint"]["state"] == pytest.approx(3 * 4 * weights, rel=1e-3)
    assert found["disk"] == 4 * sum(found["checkpoint"].values())
    assert found["memory"]["parts"]["weights"] == 4 * weights
    assert found["memory"]["parts"]["gradients"] == 4 * weights  # DDP's buckets, always there
    assert found["memory"]["peak"] == sum(found["memory"]["parts"].values())
    assert found["memory"]["interpreter"] > 50e6


def test_what_is_missing_or_unknown_is_told() -> None:
    with pytest.raises(UserError, match=r"no store at work/store.*--vocab-size"):
        estimate(PRESETS / "tiny_gpt2.json")
    with pytest.raises(UserError, match='--device: do not know "h10"; did you mean'):
        estimate(PRESETS / "tiny_gpt2.json", device="h10", vocab_size=5000)
    parameters = Parameters.load(PRESETS / "tiny_gpt2.json", ['batch_size={"0": 4, "1": 4}'])
    with pytest.raises(UserError, match="2 nodes"):
        share_of(parameters, 3)


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
    found = device(name)
    assert (found.memory, found.peak_tflops) == (gibibytes * GIB, peak)


def test_zero_shares_what_its_stage_says() -> None:
    elements = 1000
    windows = {
        "forward": {"weights": 4000, "optimizer": 8000, "activations": 700},
        "optimizer step": {"weights": 4000, "optimizer": 8000, "gradients": 4000},
    }
    for stage, weights, gradients in ((0, 4000, 0), (1, 5000, 1000), (2, 5000, 1000), (3, 2000 + 4000, 1000)):
        found = shared(windows, World(4, stage, micro_steps=1), parameters=elements, trained=elements)["forward"]
        assert found["weights"] == weights, stage
        assert found.get("gradients", 0) == gradients, stage
        assert found["optimizer"] == (2000 if stage else 8000)
        assert found.get("communication", 0) == (4 * BUCKET if stage else 0)
        assert found["activations"] == 700
    accumulated = {"forward": {**windows["forward"], "gradients": 4000}}
    world = World(4, 1, micro_steps=2)  # stage 1 keeps whole gradients between micro-steps, stage 2 does not
    assert shared(accumulated, world, parameters=elements, trained=elements)["forward"]["gradients"] == 4000
    assert world.gradients_stay and not World(4, 2, micro_steps=2).gradients_stay
    assert World(2, None, micro_steps=1).gradients_stay and not World(1, None, micro_steps=1).gradients_stay
