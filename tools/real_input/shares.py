"""Which store the rows of a run came from, as its newest checkpoint has it.

python tools/real_input/shares.py RUN
"""

from __future__ import annotations

import sys
from pathlib import Path

from terakoya.runs.checkpoints import read_manifest
from terakoya.runs.finding import find_checkpoint


def main() -> None:
    """Prints a table."""
    positions = read_manifest(find_checkpoint(Path(sys.argv[1])))["positions"]
    rows = sum(each["rows"] for each in positions)
    print("| store | rows | share | epochs |\n|---|---:|---:|---:|")
    for each in positions:
        epochs = f"{each['epoch']}, and {each['position']} rows"
        print(f"| {each['store']} | {each['rows']:,} | {100 * each['rows'] / rows:.2f} % | {epochs} |")


if __name__ == "__main__":
    main()
