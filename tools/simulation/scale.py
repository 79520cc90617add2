"""A run on 8 to 1,024 GPUs: for each number the fastest layout that this program runs, and the fastest that there is; a
Markdown table.

    python tools/simulation/scale.py                                      llama_8b on H100s, nodes of 8
    python tools/simulation/scale.py parameters/gpt2_300m.json --vocab-size 32768 --gpus 8 16 --gpu a100-80gb

The global batch stays what the parameters say, so more GPUs take fewer rows each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from terakoya.commands.estimate_layouts import shown
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.estimation.layouts.cluster import Cluster, find_gpu
from terakoya.estimation.layouts.measured_model import measure_transformer
from terakoya.estimation.layouts.suggest import Suggestion, suggest
from terakoya.estimation.synthetic_rows import row_statistics

PRESET = Path(__file__).parents[2] / "parameters" / "llama_8b.json"
TOKENS = 1e12
"""How many tokens the days of the table are for."""


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("parameters", type=Path, nargs="?", default=PRESET)
    parser.add_argument("--vocab-size", type=int, default=65536)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    arguments = parser.parse_args()
    parameters = Parameters.load(arguments.parameters)
    text = row_statistics(parameters, arguments.vocab_size)
    model, state = measure_transformer(parameters, text.vocabulary, context=text.context)
    print(f"| {arguments.gpu} | layout | micro-batch | recomputed | memory | a step | tokens/s | MFU | 10^12 tokens |")
    print("|---:|---|---:|---|---:|---:|---:|---:|---:|")
    for count in arguments.gpus:
        try:
            found = suggest(
                parameters,
                model,
                Cluster(find_gpu(arguments.gpu), count, arguments.gpus_per_node),
                state=state,
                count=1,
            )
        except UserError as error:
            print(f"| {count} | {error} | | | | | | | |")
            continue
        runs = next((each for each in found if each.refused is None), None)
        if runs is not None:
            print(row(str(count), runs))
        if found[0] is not runs:
            print(row("" if runs is not None else str(count), found[0]))
    return 0


def row(count: str, each: Suggestion) -> str:
    """A line of the table; a layout that this program does not run is in italics."""
    layout = shown(each.parallel) if each.refused is None else f"*{shown(each.parallel)}*"
    days = TOKENS / each.time.tokens_per_second / 86400
    return (
        f"| {count} | {layout} | {each.micro_batch_size} x {each.layout.micro_steps} | "
        f"{each.activation_checkpointing or 'nothing'} | {each.bytes / 1e9:.0f} GB | {each.time.seconds:.2f} s | "
        f"{each.time.tokens_per_second:,.0f} | {each.time.mfu:.1%} | {days:,.1f} days |"
    )


if __name__ == "__main__":
    sys.exit(main())
