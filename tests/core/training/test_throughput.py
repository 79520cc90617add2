"""Rates of a run: arithmetic, the table of devices, and the values that a real run logs."""

from __future__ import annotations

from pathlib import Path

import pytest
import toy

from terakoya import train
from terakoya.config.parameters import Parameters
from terakoya.training.throughput import Throughput, peak_tflops


def test_rates_are_of_the_whole_run_and_tflops_per_device() -> None:
    both = Throughput(flops_per_token=2e9, devices=("a", "b"), peak=400.0)
    values = both.values(tokens=300_000, samples=600, seconds=3.0)
    assert values == pytest.approx({"tokens_per_second": 1e5, "samples_per_second": 200.0, "tflops": 100.0, "mfu": 0.5})
    unknown = Throughput(2e9, ("cpu",), None).values(tokens=300_000, samples=600, seconds=3.0)
    assert "mfu" not in unknown and unknown["tflops"] == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("cpu", None),
    ],
)
def test_peaks_by_the_drivers_name_of_a_device(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.slow
def test_a_run_logs_its_rates(store: Path, tmp_path: Path) -> None:
    """2 layers of width 16, feed-forward 32, a vocabulary of 200: all values but the context are known."""
    settings = toy.parameters(store, max_steps=6, logging_steps=2)
    train(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    start = toy.records(tmp_path / "run", "start")[0]
    weights, head = 2 * (4 * 16**2 + 2 * 16 * 32), 16**2 + 16 * 200
    context = (start["flops_per_token"] - 6 * weights - 6 * 0.2 * head) / (12 * 2 * 16)
    assert 3 < context < 32, "documents are shorter than rows"
    assert start["max_steps"] == 6 and start["global_rows"] == 16 and start["peak_tflops"] is None
    assert start["devices"] == {"cpu": 1} and start["versions"]["torch"]
    steps = toy.records(tmp_path / "run")
    assert sorted(steps) == [1, 2, 4, 6]
    for step, rows in ((1, 16), (2, 16), (4, 32), (6, 32)):
        line = steps[step]
        seconds = rows / line["samples_per_second"]
        tokens = line["tokens"] - (steps[{2: 1, 4: 2, 6: 4}[step]]["tokens"] if step > 1 else 0)
        assert line["tokens_per_second"] * seconds == pytest.approx(tokens)
        assert line["tflops"] == pytest.approx(start["flops_per_token"] * line["tokens_per_second"] / 1e12)
        assert "mfu" not in line
