"""Writes docs/reference/choosing.md: corpus x card -> preset, steps, hours, by the code of `terakoya init`.

python tools/choosing.py [--out docs/reference/choosing.md]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from terakoya_planning.choosing import FAMILIES as RECIPES
from terakoya_planning.choosing import Choice, choose, choose_vocabulary, count_tokens, find_machine
from terakoya_planning.speed import describe_hours

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "choosing.md"
CORPORA = (("10 MB", 1e7), ("100 MB", 1e8), ("1 GB", 1e9), ("10 GB", 1e10), ("100 GB", 1e11))
"""Bytes of Japanese text in UTF-8, which has about three bytes a character."""
MACHINES = (("rtx-4090", 1), ("a100-80gb", 1), ("h200", 1), ("h200", 8))
HOURS = 24
FAMILIES = ("encoder", "electra", "decoder")

HEAD = """\
# Which model, for how long?

What `terakoya init` chooses for a corpus and a machine. The tables are made by `tools/choosing.py` with the same code.

**The times are predictions**. Where the model was measured on that card, the time is that of the measured rate.
Otherwise it is a range, and no measurement: 12 to 38 % of the card's peak in bfloat16, as seen of other models on an
H200, and at least 10 to 40 ms for each micro-step, as small models are too little work for a card. See what `terakoya
train --dry-run` says on your machine. Each run gets at most {hours} hours, also at the slow end. Sizes are those of
Japanese text in UTF-8, uncompressed. `passes` is how often the run passes over the corpus.

The rules: of the presets for which the corpus is large enough, the one whose loss is expected to be lowest after the
hours, by the fit of [Besiroglu et al. (2024)](https://arxiv.org/abs/2404.10102) to the models of Chinchilla, 482 /
N^0.348 + 2085 / D^0.366 for N parameters outside the embeddings and D tokens. An encoder passes at most 40 times over
its corpus and needs 2 different tokens for each such parameter; a decoder passes 4 times and needs 5. A run of fewer
than 5,000 steps gets smaller batches, down to 2,048 tokens. Muon's rate is 9 over the width and the cube root of the
steps, which are taken for 250 at least; with larger batches it grows as their square root up to the preset's rate. That
of other optimizers falls as the square root of the rows. `terakoya init` writes the reason for each number into the
pipeline file. `--like bert` and other models choose among the presets of their papers, by the same rules.

What they rest on: the fit is of causal models of 70 M parameters and more, 4 passes of causal models, too (Muennighoff
et al., 2023), 40 passes are BERT's own. Two sizes of encoder were compared after the same minutes of one core, and the
batches of short runs ([figures](../../tools/bench/README.md#sizes-after-the-same-minutes)): `tiny_modernbert` is ahead
of `bert_ja_small` by 0.36 after 8 minutes and by 0.20 after 32, as the fit says. By the fit they meet after some 80,
which was not measured. Chinchilla's own numbers, which the fit corrects, would have the larger one ahead after 26. That
an encoder needs 2 different tokens is our rule, and not measured. Muon's rate is a fit to
[runs of 300 to 7,200 steps](../../tools/bench/README.md#rates-of-long-runs) of 2,048 tokens with widths of 128 and 256;
how it grows with the batch is Adam's rule (Malladi et al., 2022), and was not measured.

`terakoya init --from MODEL` takes the model's own size. A masked model reads the text of the field at most 10 times, a
causal one 4 times, with as many rows of general text besides as `--replay-share` says. The learning rate is 2e-4 at a
hidden size of 768 and 256 rows a step (Gururangan et al., 2020), falls as one over the size and as the square root of
the rows, and ends at 0. The vocabulary grows where an eighth more pieces, each found 20 times, save 5 % of the tokens.
[What that does](../tutorials/continued-pretraining.md) was measured at toy size.
"""


def choose_for(size: float, gpu: str, count: int, family: str) -> Choice:
    """Returns the choice for `size` bytes of Japanese text and `count` cards."""
    characters = round(size / 3)
    return choose(
        tokens=count_tokens(characters, "ja"),
        vocabulary=choose_vocabulary(characters, "ja", causal=RECIPES[family].causal),
        recipe=RECIPES[family], goal="model", machine=find_machine(gpu, count), hours=HOURS,
    )  # fmt: skip


def row(name: str, size: float, gpu: str, count: int, family: str) -> str:
    """Returns the row of a table for `name`, a corpus of `size` bytes."""
    choice = choose_for(size, gpu, count, family)
    rows = choice.parameters["batch_size"]["-1"]
    cells = (
        name, f"{count} x {gpu}", f"`{choice.preset}`", f"{choice.vocabulary:,}", f"{rows:,}", f"{choice.steps:,}",
        f"{choice.passes:.2g}", describe_hours(choice.hours),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def page() -> Iterator[str]:
    """Yields the lines of the page."""
    yield HEAD.format(hours=HOURS)
    for family in FAMILIES:
        yield f"## {family}\n"
        yield "| corpus | card | preset | vocabulary | rows a step | steps | passes | time, predicted |"
        yield "|---|---|---|--:|--:|--:|--:|--:|"
        for name, size in CORPORA:
            for gpu, count in MACHINES:
                yield row(name, size, gpu, count, family)
        yield ""


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(page()).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
