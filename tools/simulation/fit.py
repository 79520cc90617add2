"""Fits the constants of `terakoya_clusters.layouts.cluster` that no maker states to some of the published runs, and
prints them; the values in that file came from here.

    python tools/simulation/fit.py

Minimises the mean of |log(predicted / published)| over the runs of two model sizes (`FITTED_MODELS`), one constant
after another, in steps that are halved when none helps. All other runs have no influence; `check.py` shows both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from published import Published, published

START = {
    "h100 products": 0.7, "h100 attention": 0.3, "a100 products": 0.7, "a100 attention": 0.3,
    "half_speed_size": 100.0, "traffic_factor": 1.0, "exposed_fraction": 0.5, "straggler_fraction": 0.02,
}  # fmt: skip
LARGEST = {"exposed_fraction": 1.0}
FIRST_STEP, LAST_STEP = 0.2, 0.004


def main() -> int:
    """Prints the constants."""
    runs = [run for run in published() if run.fitted]
    constants = fit(runs)
    print(f"{len(runs)} runs, mean of |log(predicted / published)| {loss(constants, runs):.4f}")
    for name, value in constants.items():
        print(f"{name:18} {value:.4g}")
    return 0


def fit(runs: Sequence[Published]) -> dict[str, float]:
    """Returns the constants that minimise `loss`."""
    best, step = dict(START), FIRST_STEP
    least = loss(best, runs)
    while step > LAST_STEP:
        before = least
        for name in best:
            for factor in (1 + step, 1 / (1 + step)):
                tried = best | {name: min(best[name] * factor, LARGEST.get(name, math.inf))}
                if (now := loss(tried, runs)) < least:
                    best, least = tried, now
        if least == before:
            step /= 2
    return best


def loss(constants: Mapping[str, float], runs: Sequence[Published]) -> float:
    """The mean of |log(predicted / published)|."""
    return sum(abs(math.log1p(with_constants(run, constants).error())) for run in runs) / len(runs)


def with_constants(run: Published, constants: Mapping[str, float]) -> Published:
    """Returns `run` on a cluster with these constants."""
    kind = "a100" if run.cluster.gpu.name.startswith("a100") else "h100"
    gpu = replace(
        run.cluster.gpu, products=constants[f"{kind} products"], attention=constants[f"{kind} attention"]
    )  # fmt: skip
    common = {name: value for name, value in constants.items() if " " not in name}
    return replace(run, cluster=replace(run.cluster, gpu=gpu, **common))


if __name__ == "__main__":
    sys.exit(main())
