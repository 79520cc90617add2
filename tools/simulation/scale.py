"""Prints, for a run on 8 to 1,024 GPUs, the fastest layout that this program supports and the fastest of all, as a
Markdown table. The numbers are not validated on hardware.

    python tools/simulation/scale.py                                      llama_8b on H100s, nodes of 8
    python tools/simulation/scale.py parameters/gpt2_300m.json --vocab-size 32768 --gpus 8 16 --gpu a100-80gb

The global batch is that of the parameters, so with more GPUs each takes fewer rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_clusters.layouts.cluster import Cluster, find_gpu
from terakoya_clusters.layouts.find_layouts import describe_parallel
from terakoya_clusters.layouts.measured_model import measure_transformer
from terakoya_clusters.layouts.suggest import Suggestion, suggest
from terakoya_planning.row_statistics import row_statistics

PRESET = Path(__file__).parents[2] / "parameters" / "llama_8b.json"
TOKENS = 1e12
"""Tokens of the run whose days are listed."""


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("parameters", type=Path, nargs="?", default=PRESET)
    parser.add_argument("--vocab-size", type=int, default=65536)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    arguments = parser.parse_args()
    parameters = Parameters.load(arguments.parameters).with_precision("bf16")
    statistics = row_statistics(parameters.data, parameters.objective.row_layout(), arguments.vocab_size)
    model, state = measure_transformer(
        parameters, statistics.vocabulary, context=statistics.context, documents_per_row=statistics.documents_per_row
    )
    print("Estimated by formulas, not validated on hardware.\n")
    print(f"| {arguments.gpu} | layout | micro-batch | recomputed | memory | a step | tokens/s | MFU | 10^12 tokens |")
    print("|---:|---|---:|---|---:|---:|---:|---:|---:|")
    for count in arguments.gpus:
        cluster = Cluster(find_gpu(arguments.gpu), count, arguments.gpus_per_node)
        try:
            suggestions = suggest(parameters, model, cluster, state=state, count=1)
        except UserError as error:
            print(f"| {count} | {error} | | | | | | | |")
            continue
        supported = next((suggestion for suggestion in suggestions if suggestion.refused is None), None)
        if supported is not None:
            print(row(str(count), supported))
        if suggestions[0] is not supported:
            print(row("" if supported is not None else str(count), suggestions[0]))
    return 0


def row(count: str, suggestion: Suggestion) -> str:
    """A table row; a layout that this program does not support is in italics."""
    layout, time = describe_parallel(suggestion.parallel), suggestion.time
    layout = layout if suggestion.refused is None else f"*{layout}*"
    recomputed = suggestion.activation_checkpointing or "nothing"
    days = TOKENS / time.tokens_per_second / 86400
    return (
        f"| {count} | {layout} | {suggestion.micro_batch_size} x {suggestion.layout.micro_steps} | "
        f"{recomputed} | {suggestion.bytes / 1e9:.0f} GB | {time.seconds:.2f} s | "
        f"{time.tokens_per_second:,.0f} | {time.mfu:.1%} | {days:,.1f} days |"
    )


if __name__ == "__main__":
    sys.exit(main())
