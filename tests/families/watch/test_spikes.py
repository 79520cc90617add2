"""A spike is found, and in steps that are sound nothing is taken for one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from terakoya.config.spikes import Spikes
from terakoya_watch.spikes import Spike, SpikeDetector

STEPS = 10_000
Trace = tuple[np.ndarray, np.ndarray]
"""Losses and gradient norms of a run, (STEPS,) each."""


def trend(steps: np.ndarray) -> np.ndarray:
    """A loss that falls fast, then slowly."""
    return 2.0 + 8.0 * np.exp(-steps / 80) + np.exp(-steps / 2000)


def noisy(draw: np.random.Generator, loss: np.ndarray, *, noise: float, norm_noise: float) -> Trace:
    """Adds what batches of few rows add: losses vary by a share, norms by factors."""
    steps = np.arange(STEPS)
    norms = (1 + 5 * np.exp(-steps / 50)) * np.exp(norm_noise * draw.standard_normal(STEPS))
    return loss * np.maximum(0.05, 1 + noise * draw.standard_normal(STEPS)), norms


def large_batches(draw: np.random.Generator) -> Trace:
    return noisy(draw, trend(np.arange(STEPS)), noise=0.01, norm_noise=0.15)


def small_batches(draw: np.random.Generator) -> Trace:
    return noisy(draw, trend(np.arange(STEPS)), noise=0.2, norm_noise=0.5)


def rewarmed(draw: np.random.Generator) -> Trace:
    """The learning rate rises again every 3,000 steps, and the loss with it."""
    steps = np.arange(STEPS)
    bump = 0.6 * np.exp(-(((steps % 3000 - 300) / 150) ** 2))
    return noisy(draw, trend(steps) + bump, noise=0.01, norm_noise=0.15)


def another_batch_size(draw: np.random.Generator) -> Trace:
    """From half of the run on the noise is five times as large."""
    quiet, loud = (noisy(draw, trend(np.arange(STEPS)), noise=each, norm_noise=3 * each) for each in (0.02, 0.1))
    late = np.arange(STEPS) > STEPS // 2
    return np.where(late, loud[0], quiet[0]), np.where(late, loud[1], quiet[1])


CLEAN = [large_batches, small_batches, rewarmed, another_batch_size]


def spikes_of(trace: Trace, detector: SpikeDetector) -> list[tuple[int, Spike]]:
    return [
        (step, spike)
        for step, (loss, norm) in enumerate(zip(*(each.tolist() for each in trace), strict=True), 1)
        for spike in detector.add(step, loss=loss, grad_norm=norm)
    ]


@pytest.mark.parametrize("make", CLEAN)
def test_no_alarm_in_ten_thousand_sound_steps(make: Callable[[np.random.Generator], Trace]) -> None:
    assert spikes_of(make(np.random.default_rng(0)), SpikeDetector(Spikes())) == []


@pytest.mark.parametrize("make", [large_batches, rewarmed])
def test_a_loss_of_three_times_the_usual_is_found_at_once_anywhere(
    make: Callable[[np.random.Generator], Trace],
) -> None:
    losses, norms = make(np.random.default_rng(1))
    for step in (3, 20, 90, 200, 1_000, 3_300, 9_999):
        spiked = losses.copy()
        spiked[step - 1] *= 3 if step >= 16 else 5
        detector = SpikeDetector(Spikes())
        first = max(0, step - 200)
        found = spikes_of((spiked[first:step], norms[first:step]), detector)
        assert [(number + first, spike.signal) for number, spike in found] == [(step, "loss")]


def test_a_gradient_norm_of_ten_times_the_usual_is_found_and_a_new_level_is_learnt() -> None:
    losses, norms = large_batches(np.random.default_rng(2))
    norms[500] *= 10
    norms[1000:] *= 10
    found = spikes_of((losses[:2000], norms[:2000]), SpikeDetector(Spikes()))
    assert [spike.signal for _, spike in found] == ["grad_norm"] * len(found)
    steps = [step for step, _ in found]
    assert steps[:2] == [501, 1001] and len(steps) <= 3, "what stays is no spike"


def test_a_data_stage_begins_anew() -> None:
    losses, norms = large_batches(np.random.default_rng(3))
    losses[699:] *= 1.8
    trace = (losses[:900], norms[:900])
    assert [step for step, _ in spikes_of(trace, SpikeDetector(Spikes()))] == [700]
    assert spikes_of(trace, SpikeDetector(Spikes(), stage_starts=[700])) == []


def test_a_first_step_of_a_stage_that_was_skipped_does_not_matter() -> None:
    detector = SpikeDetector(Spikes(), stage_starts=[40])
    for step in range(1, 39):
        detector.add(step, loss=2.0 + step % 2 / 10, grad_norm=1.0 + step % 2 / 10)
    assert math.isfinite(detector.norm_limit(39)) and detector.norm_limit(41) == math.inf
    assert detector.add(42, loss=20.0, grad_norm=30.0) == []


def test_a_state_survives_json() -> None:
    losses, norms = small_batches(np.random.default_rng(4))
    straight, cut = SpikeDetector(Spikes()), SpikeDetector(Spikes())
    for step in range(1, 200):
        loss, norm = float(losses[step]), float(norms[step] * (100 if step % 60 == 0 else 1))
        assert straight.add(step, loss=loss, grad_norm=norm) == cut.add(step, loss=loss, grad_norm=norm)
        assert straight.norm_limit(step + 2) == cut.norm_limit(step + 2)
        if step % 7 == 0:
            state, cut = json.loads(json.dumps(cut.state())), SpikeDetector(Spikes())
            cut.load(state)


def test_losses_and_norms_of_zero_have_limits() -> None:
    detector = SpikeDetector(Spikes())
    found = [detector.add(step, loss=0.0, grad_norm=0.0) for step in range(1, 60)]
    assert not any(found)


def test_a_spike_lasts_while_no_loss_is_below_its_limit() -> None:
    detector = SpikeDetector(Spikes(), stage_starts=[40])

    def add(step: int, loss: float) -> int:
        detector.add(step, loss=loss, grad_norm=1.0 + step % 2 / 10)
        return detector.lasting.steps if detector.lasting else 0

    assert [add(step, 2.0 + step % 2 / 10) for step in range(1, 30)] == [0] * 29
    assert [add(30, 20.0), add(31, 9.0)] == [1, 2]
    detector.add_not_finite()
    cut = SpikeDetector(Spikes())
    cut.load(json.loads(json.dumps(detector.state())))
    assert cut.lasting == detector.lasting is not None and cut.lasting.steps == 3 and cut.lasting.step == 30
    assert [add(33, 30.0), add(34, 2.0), add(35, 2.0)] == [4, 0, 0]
    assert [add(36, 200.0), add(37, 150.0), add(40, 160.0)] == [1, 2, 0], "a data stage may have another level"
