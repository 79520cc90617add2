"""Compares the formulas of `terakoya.estimation` with every published run, and states their error: a Markdown table.

    python tools/simulation/check.py            by source and device
    python tools/simulation/check.py --all      and each run

Errors are predicted over published tokens per second, less 1. "Fitted" are the runs that constants were fitted to.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from published import Published, published

ONE_BY_ONE = 12
"""Sources with no more runs than this are shown run by run."""


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help="every run, not only those of small sources")
    arguments = parser.parse_args()
    runs = published()
    groups: dict[tuple[bool, str, str], list[Published]] = {}
    for run in runs:
        groups.setdefault((run.fitted, run.source, run.cluster.gpu.name), []).append(run)
    print("| source | device | runs | | mean error | mean of its size | 9 of 10 within | largest |")
    print("|---|---|---:|---|---:|---:|---:|---:|")
    for (fitted, source, device), each in groups.items():
        print(f"| {source} | {device} | {len(each)} | {'fitted' if fitted else 'held out'} | {errors(each)} |")
    held = [run for run in runs if not run.fitted]
    print(f"| **all that were held out** | | {len(held)} | | {errors(held)} |\n")
    print("| run | GPUs | layout | published | predicted | error | memory, GiB | error |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    sizes = {run.source: sum(other.source == run.source for other in runs) for run in runs}
    for run in runs:
        if arguments.all or sizes[run.source] <= ONE_BY_ONE:
            print(row(run))
    return 0


def errors(runs: Sequence[Published]) -> str:
    """Cells that say how far off the predictions of `runs` are."""
    found = [run.error() for run in runs]
    apart = sorted(abs(each) for each in found)
    within = apart[min(len(apart) - 1, int(0.9 * len(apart)))]
    return " | ".join(
        (f"{statistics.mean(found):+.1%}", f"{statistics.mean(apart):.1%}", f"{within:.1%}", f"{apart[-1]:.1%}")
    )


def row(run: Published) -> str:
    """One run."""
    layout = run.layout
    axes = [("tp", layout.tensor), ("pp", layout.pipeline), ("v", layout.virtual), ("dp", layout.data)]
    shape = " ".join(f"{name} {size}" for name, size in axes if size > 1)
    told = f"{shape or 'one'}, ZeRO {layout.zero_stage}, {layout.micro_batch_size} x {layout.micro_steps} rows of "
    told += f"{run.model.sequence_length}, recomputed: {layout.recomputation or 'nothing'}"
    predicted = run.time().tokens_per_second / run.cluster.gpus
    memory = run.memory_error()
    of_memory = " | " if run.gib is None or memory is None else f"{run.gib:.1f} | {memory:+.1%}"
    return (
        f"| {run.source}: {run.name}, {run.cluster.gpu.name} | {run.cluster.gpus} | {told} | {run.rate:,.0f} | "
        f"{predicted:,.0f} | {run.error():+.1%} | {of_memory} |"
    )


if __name__ == "__main__":
    sys.exit(main())
