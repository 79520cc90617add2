"""How long `terakoya --help` takes: the median wall time of ten runs. Exits with 1 above the goal.

python tools/bench/help.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

GOAL = 0.4
RUNS = 10


def main() -> int:
    """Prints the median and the extremes in seconds. Returns the exit status."""
    command = [str(Path(sys.executable).with_name("terakoya")), "--help"]
    subprocess.run(command, check=True, capture_output=True)  # what is compiled and cached once
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    print(f"terakoya --help: {median:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}, {RUNS} runs; goal {GOAL} s)")
    return int(median > GOAL)


if __name__ == "__main__":
    sys.exit(main())
