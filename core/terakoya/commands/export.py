"""`terakoya export`: a run or checkpoint becomes a Transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[Path, typer.Argument(help="RUN, or one of RUN/checkpoints/step-...", metavar="RUN|CHECKPOINT")],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    format: Annotated[str, typer.Option(help="The exporter's name.")] = "huggingface",
    only: Annotated[
        str | None, typer.Option(help="Of several models only this one: generator or discriminator.")
    ] = None,
) -> None:
    """Write the model, or models, of a run or checkpoint as a folder that Transformers loads."""
    from rich.console import Console

    from terakoya.export_model import export

    done = export(source, out, format=format, only=only)
    console = Console(highlight=False)
    console.print(f"exported {done.checkpoint} (step {done.step:,}) to {done.out}", soft_wrap=True)
    for name, model in done.models.items():
        folder = done.out / name
        console.print(f"  from transformers import AutoTokenizer, {model}", markup=False, soft_wrap=True)
        trust = ", trust_remote_code=True" if name in done.own_code else ""
        console.print(f'  model = {model}.from_pretrained("{folder}"{trust})', markup=False, soft_wrap=True)
        console.print(f'  tokenizer = AutoTokenizer.from_pretrained("{folder}"{trust})', markup=False, soft_wrap=True)
