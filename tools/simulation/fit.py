"""Fits the constants of `terakoya.estimation.layouts.cluster` that no maker states to some of the published runs, and
prints them: what is written there came from here.

    python tools/simulation/fit.py

The sum of |log(predicted / published)| over the runs of two model sizes (`FITTED_MODELS`) is made small, one constant
after another, in steps that are halved when none helps. All other runs have no say; `check.py` shows both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from published import Published, published

START = {
    "h100 products": 0.7, "h100 attention": 0.3, "a100 products": 0.7, "a100 attention": 0.3,
    "half": 100.0, "passes": 1.0, "exposed": 0.5, "waiting": 0.02,
}  # fmt: skip
LARGEST = {"exposed": 1.0}
FIRST_STEP, LAST_STEP = 0.2, 0.004


def main() -> int:
    """Prints the constants."""
    runs = [each for each in published() if each.fitted]
    found = fit(runs)
    print(f"{len(runs)} runs, mean of |log(predicted / published)| {loss(found, runs):.4f}")
    for name, value in found.items():
        print(f"{name:16} {value:.4g}")
    return 0


def fit(runs: Sequence[Published]) -> dict[str, float]:
    """The constants with which `loss` is small."""
    found, step = dict(START), FIRST_STEP
    least = loss(found, runs)
    while step > LAST_STEP:
        before = least
        for name in found:
            for factor in (1 + step, 1 / (1 + step)):
                tried = found | {name: min(found[name] * factor, LARGEST.get(name, math.inf))}
                if (now := loss(tried, runs)) < least:
                    found, least = tried, now
        if least == before:
            step /= 2
    return found


def loss(constants: Mapping[str, float], runs: Sequence[Published]) -> float:
    """The mean of |log(predicted / published)|."""
    return sum(abs(math.log1p(having(each, constants).error())) for each in runs) / len(runs)


def having(run: Published, constants: Mapping[str, float]) -> Published:
    """`run` on devices with these constants."""
    kind = "a100" if run.cluster.gpu.name.startswith("a100") else "h100"
    gpu = replace(
        run.cluster.gpu, products=constants[f"{kind} products"], attention=constants[f"{kind} attention"]
    )  # fmt: skip
    of_all = {name: constants[name] for name in ("half", "passes", "exposed", "waiting")}
    return replace(run, cluster=replace(run.cluster, gpu=gpu, **of_all))


if __name__ == "__main__":
    sys.exit(main())
