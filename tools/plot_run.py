"""Draws the curves of one or more runs from their metrics.jsonl: loss and masked accuracy, or whatever else is there.

python tools/plot_run.py work/run --out run.png
python tools/plot_run.py work/small work/base --labels small base --against hours --out runs.png
python tools/plot_run.py work/electra --numbers generator_loss discriminator_loss discriminator_auc --out electra.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from terakoya.errors import UserError
from terakoya.runs import metrics
from terakoya.runs.metrics import Curves

Against = Literal["steps", "hours"]
NUMBERS = ("loss", "masked_accuracy")


def read(folder: Path, numbers: Sequence[str] = NUMBERS) -> Curves:
    """The curves of `numbers` of the run in `folder`. Steps that a resumed run did again count once, as last done.

    Lines that are damaged are left out and said. Raises SystemExit with a sentence if there is no metrics.jsonl.
    """
    try:
        written = metrics.read(folder)
    except UserError as error:
        raise SystemExit(str(error)) from None
    for problem in written.problems():
        print(f"{folder}: {problem}", file=sys.stderr)
    return metrics.curves(written, numbers)


def draw(runs: Sequence[tuple[str, Curves]], numbers: Sequence[str] = NUMBERS, *, against: Against = "steps") -> Any:
    """A matplotlib figure: one of `numbers` below another, restarts as dotted vertical lines."""
    size = (9, 1 + 3 * len(numbers))
    figure, grid = pyplot.subplots(len(numbers), 1, sharex=True, figsize=size, layout="constrained", squeeze=False)
    axes = grid[:, 0]
    colours = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
    for index, (label, curves) in enumerate(runs):
        colour = colours[index % len(colours)]
        for axis, ending in zip(axes, numbers, strict=True):
            _draw_curves(axis, label, curves, ending, colour, against)
            for restart in curves.restarts:
                axis.axvline(restart[against == "hours"], color=colour, linestyle=":", linewidth=1)
    for axis, name in zip(axes, numbers, strict=True):
        axis.set_ylabel(name.replace("_", " ") + " (nats)" * name.endswith("loss"))
    axes[-1].set_xlabel("optimizer steps" if against == "steps" else "hours of training")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    return figure


def _draw_curves(axis: Axes, label: str, curves: Curves, ending: str, colour: str, against: Against) -> None:
    for name, points in curves.points.items():
        if name != ending and not name.endswith(f" {ending}"):
            continue
        validation = name.startswith("validation")
        axis.plot(
            [point[against == "hours"] for point in points],
            [point[2] for point in points],
            color=colour,
            linestyle="--" if validation else "-",
            marker="o" if validation else None,
            markersize=3,
            linewidth=1.4 if validation else 0.9,
            alpha=1.0 if validation else 0.6,
            label=f"{label}: {name.removesuffix(ending).strip() or 'training'}",
        )


def main() -> None:
    """Reads the command line, draws and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write, for example run.png")
    parser.add_argument("--labels", nargs="+", help="one name for each run (default: the folders' names)")
    parser.add_argument("--against", choices=("steps", "hours"), default="steps", help="the horizontal axis")
    parser.add_argument(
        "--numbers", nargs="+", default=list(NUMBERS), metavar="NUMBER", help="what metrics.jsonl names"
    )
    arguments = parser.parse_args()
    labels = arguments.labels or [run.resolve().name for run in arguments.runs]
    if len(labels) != len(arguments.runs):
        parser.error(f"--labels: expected {len(arguments.runs)} names, got {len(labels)}")
    runs = [(label, read(run, arguments.numbers)) for label, run in zip(labels, arguments.runs, strict=True)]
    for label, curves in runs:
        missing = [name for name in arguments.numbers if not any(each.split()[-1] == name for each in curves.points)]
        if missing:
            raise SystemExit(f"{label}: metrics.jsonl has no {', '.join(missing)}")
    figure = draw(runs, arguments.numbers, against=arguments.against)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=150)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
