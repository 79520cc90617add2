"""Where hours come from: a measurement of this machine, of a card, an earlier run, or a range that says what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.distributed.topology import RankBatch, host_name
from terakoya_planning.devices import find_device
from terakoya_planning.kept_rates import KeptRates, machine_facts, rate_facts, seconds_of_run
from terakoya_planning.probe import Probed
from terakoya_planning.speed import SEEN_SHARES, card_rates, describe_hours, measured_speed, planned_speed
from terakoya_planning.step_rate import StepRate

SHARE = RankBatch(0, 32, 8, 4, 32)
PROBED = Probed(StepRate(0.5, 0.25, 0.125), "the whole model")


def preset(name: str, *changes: str) -> Parameters:
    return Parameters.load(Path(name), changes).with_precision("bf16")


def planned(parameters: Parameters, gpu: str, **given: Any) -> Any:
    return planned_speed(
        parameters, find_device(gpu), processes=2, share=SHARE, flops_per_step=given.pop("flops", 1e15), **given
    )


def test_a_measured_step_is_its_micro_steps_and_an_update() -> None:
    speed = measured_speed(PROBED, SHARE)
    assert speed.low == speed.high == 4 * 0.5 + 0.25 and speed.source == "probe"
    assert speed.evaluation * speed.low == pytest.approx(4 * 0.125)


@pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200"])
def test_a_model_that_was_measured_on_a_card_has_its_rate_there(name: str) -> None:
    (rate,) = [each for each in card_rates() if each.preset == "gpt2_125m"]
    flops = 1e6 * rate.flops_per_token
    speed = planned(preset("gpt2_125m", "cuda_graphs=false"), name, flops=flops)
    assert speed.source == "card" and "H200-2026-11-27" in speed.said and "529,546 tokens/s" in speed.said
    assert speed.low == speed.high == pytest.approx(1e6 / rate.tokens_per_second / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "gpu", "changes"),
    [
        ("gpt2_125m", "h100", ()),
        ("gpt2_300m", "h200", ()),
        ("gpt2_125m", "h200", ("deterministic=false",)),
        ("gpt2_125m", "h200", ("data.sequence_length=512",)),
    ],
)
def test_another_card_model_or_setting_has_a_range(name: str, gpu: str, changes: tuple[str, ...]) -> None:
    speed = planned(preset(name, *changes), gpu)
    low, high = SEEN_SHARES
    assert speed.source == "range" and speed.said.startswith("not a measurement: ")
    assert speed.low == pytest.approx(1e15 / (2 * high * 989e12)) and speed.high == pytest.approx(
        speed.low * high / low
    )
    shares = [each.tflops / 989 for each in card_rates()]  # all are of H200s
    assert low <= min(shares) and max(shares) <= high + 0.005


def test_the_range_of_float32_is_slower_and_a_small_step_waits_for_its_host() -> None:
    half, whole = (planned(preset("gpt2_300m", f"precision={each}"), "a100-80gb") for each in ("bf16", "fp32"))
    assert whole.low > 2 * half.low and whole.high > 10 * half.high
    tiny = planned(preset("tiny_bert", "precision=bf16"), "h100", flops=1e9)
    assert (tiny.low, tiny.high) == (0.04, 0.16), "four micro-steps, none of which is faster than a host starts it"


def test_what_is_given_goes_before_what_was_measured_and_a_cpu_is_unknown() -> None:
    assert planned(preset("gpt2_125m"), "h200", tflops=100.0).low == pytest.approx(1e15 / 2e14)
    assert planned(preset("gpt2_125m"), "h200", mfu=0.5).low == pytest.approx(1e15 / 989e12)
    assert planned(preset("tiny_bert", "precision=bf16"), "cpu") is None


@pytest.mark.parametrize(
    ("hours", "said"),
    [
        ((0.1, 0.1), "6.0 minutes"),
        ((0.2, 0.5), "12–30 minutes"),
        ((0.5, 1.5), "0.5–1.5 hours"),
        ((12.0, 12.0), "12.0 hours"),
        ((24.0, 96.0), "24.0–96.0 hours (1.0–4.0 days)"),
    ],
)
def test_hours_in_words(hours: tuple[float, float], said: str) -> None:
    assert describe_hours(hours) == said


def facts(*changes: str, rows: int = 32) -> dict[str, Any]:
    return rate_facts(preset("tiny_bert", *changes), vocab_size=8000, rows=rows, processes=1)


def test_a_rate_is_kept_for_the_machine_and_for_what_determines_it(tmp_path: Path) -> None:
    rates, here = KeptRates(tmp_path / "cache/rates.json"), machine_facts(1)
    assert rates.find(here, facts()) is None
    rates.keep(here, facts(), PROBED)
    assert rates.find(here, facts()) == PROBED
    same = facts("optimizer.learning_rate=0.1", "max_steps=9", 'data.train=["elsewhere"]', "seed=1", "batch_size.-1=64")
    assert rates.find(here, same) == PROBED
    assert rates.find({**here, "threads": 99}, facts()) is None
    for other in ("precision=fp32", "architecture.num_hidden_layers=5", "data.sequence_length=64", "attention=eager"):
        assert rates.find(here, facts(other)) is None, other
    assert rates.find(here, facts(rows=16)) is None and "optimizer" in facts()


@pytest.mark.parametrize("content", ["", "[1]", "{broken"])
def test_a_damaged_or_unwritable_cache_is_one_that_is_empty(content: str, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(content)
    rates, here = KeptRates(tmp_path / "rates.json"), machine_facts(1)
    assert rates.find(here, facts()) is None
    rates.keep(here, facts(), PROBED)
    assert rates.find(here, facts()) == PROBED
    (tmp_path / "file").touch()
    KeptRates(tmp_path / "file/rates.json").keep(here, facts(), PROBED)


def written_run(folder: Path, **changes: Any) -> Parameters:
    """Writes a run that took two seconds a step since it was last started, and a validation of 10 seconds."""
    raw = toy.parameters(Path("nowhere"))
    folder.mkdir()
    (folder / "parameters.json").write_text(json.dumps(raw))
    here = machine_facts(1)
    start = {
        "kind": "start", "hosts": [host_name()], "world": {"processes": 1, "threads": here["threads"]},
        "versions": {"torch": here["torch"], "terakoya": here["terakoya"]},
    }  # fmt: skip
    lines: list[dict[str, Any]] = [{**start, "time": 0.0}, {"kind": "step", "step": 90, "time": 1.0}]
    lines.append({**start, "time": 1000.0, **changes})
    for step in range(100, 121, 4):
        pause = 10 if step > 110 else 0
        lines.append({"kind": "step", "step": step, "time": 1000.0 + 2 * (step - 100) + pause})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return Parameters.from_dict(raw, source="test")


def test_an_earlier_run_of_this_machine_says_how_long_a_step_takes(tmp_path: Path) -> None:
    parameters = written_run(tmp_path / "run")
    assert seconds_of_run(tmp_path / "run", parameters, processes=1) == pytest.approx((40 + 10) / 20)
    assert seconds_of_run(tmp_path / "run", parameters, processes=2) is None
    other = parameters.model_copy(update={"micro_batch_size": 3})
    assert seconds_of_run(tmp_path / "run", other, processes=1) is None
    assert seconds_of_run(tmp_path / "nothing", parameters, processes=1) is None


def test_a_run_of_another_machine_says_nothing(tmp_path: Path) -> None:
    parameters = written_run(tmp_path / "run", hosts=["elsewhere"])
    assert seconds_of_run(tmp_path / "run", parameters, processes=1) is None
