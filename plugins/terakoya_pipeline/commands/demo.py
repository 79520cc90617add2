"""`terakoya demo`: the whole pipeline on the bundled corpus."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command
from terakoya.places import check_local


def demo(out: Path = Path("work/demo"), *, max_steps: int | None = None, fresh: bool = False) -> Path:
    """Runs the pipeline on the bundled corpus into the folder `out`, prints a summary and returns the model's folder.

    Skips the stages that an earlier demo finished there, unless `fresh`.
    """
    from terakoya.log import console
    from terakoya_pipeline.demo import MAX_STEPS, Demo, summary_lines
    from terakoya_pipeline.run import run_pipeline

    check_local(out, "the demo's folder")
    files = Demo(out)
    start = time.perf_counter()
    results = list(run_pipeline(files.write(max_steps=max_steps or MAX_STEPS, fresh=fresh)))
    seconds = time.perf_counter() - start
    console().print(f"\nterakoya demo: {seconds:.0f} s", soft_wrap=True)
    for line in summary_lines(files, results):
        console().print(line, markup=False, soft_wrap=True)
    if all(result.skipped for result in results):
        console().print("\nEverything was already made; `terakoya demo --fresh` makes it again.", soft_wrap=True)
    return files.model


def command(
    out: Annotated[Path, typer.Option(help="The folder for corpus, tokenizer, stores, run and model.")] = Path(
        "work/demo"
    ),
    max_steps: Annotated[int | None, typer.Option(min=2, help="Number of training steps.", show_default=False)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="First delete what an earlier demo made there.")] = False,
) -> None:
    """Go from tokenizer to finished model on the bundled corpus, in two minutes on two CPU cores."""
    # It trains in two processes: a second thread slows a model this small down where other programs need the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = demo(out, max_steps=max_steps, fresh=fresh)
    from terakoya_pipeline.demo import SENTENCES

    next_command.show("try", model, SENTENCES[0])
