"""Compares the formulas of `terakoya_planning` with all published runs; prints their errors as Markdown tables.

    python tools/simulation/check.py            by source and device
    python tools/simulation/check.py --all      and every run

An error is predicted over published tokens per second, minus 1. Constants were fitted to the "fitted" runs only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from published import Published, published

SMALL_SOURCE = 12
"""The runs of sources with at most this many are listed."""


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help="list every run, not only those of small sources")
    arguments = parser.parse_args()
    runs = published()
    groups: dict[tuple[bool, str, str], list[Published]] = {}
    for run in runs:
        groups.setdefault((run.fitted, run.source, run.cluster.gpu.name), []).append(run)
    print("| source | device | runs | | mean error | mean of its size | 9 of 10 within | largest |")
    print("|---|---|---:|---|---:|---:|---:|---:|")
    for (fitted, source, device), group in groups.items():
        print(f"| {source} | {device} | {len(group)} | {'fitted' if fitted else 'held out'} | {errors(group)} |")
    held_out = [run for run in runs if not run.fitted]
    print(f"| **all that were held out** | | {len(held_out)} | | {errors(held_out)} |\n")
    print("| run | GPUs | layout | published | predicted | error | memory, GiB | error |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    counts = {run.source: sum(other.source == run.source for other in runs) for run in runs}
    for run in runs:
        if arguments.all or counts[run.source] <= SMALL_SOURCE:
            print(row(run))
    return 0


def errors(runs: Sequence[Published]) -> str:
    """Table cells with the errors of the predictions of `runs`."""
    signed = [run.error() for run in runs]
    sizes = sorted(abs(error) for error in signed)
    within = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return " | ".join(
        (f"{statistics.mean(signed):+.1%}", f"{statistics.mean(sizes):.1%}", f"{within:.1%}", f"{sizes[-1]:.1%}")
    )


def row(run: Published) -> str:
    """A table row for one run."""
    layout = run.layout
    axes = [("tp", layout.tensor), ("pp", layout.pipeline), ("v", layout.virtual), ("dp", layout.data)]
    shape = " ".join(f"{name} {size}" for name, size in axes if size > 1)
    description = (
        f"{shape or 'one'}, ZeRO {layout.zero_stage}, {layout.micro_batch_size} x {layout.micro_steps} rows of "
    )
    description += f"{run.model.sequence_length}, recomputed: {layout.recomputation or 'nothing'}"
    predicted = run.time().tokens_per_second / run.cluster.gpus
    memory = run.memory_error()
    memory_cells = " | " if run.gib is None or memory is None else f"{run.gib:.1f} | {memory:+.1%}"
    return (
        f"| {run.source}: {run.name}, {run.cluster.gpu.name} | {run.cluster.gpus} | {description} | {run.rate:,.0f} | "
        f"{predicted:,.0f} | {run.error():+.1%} | {memory_cells} |"
    )


if __name__ == "__main__":
    sys.exit(main())
