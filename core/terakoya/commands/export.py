"""`terakoya export`: writes the models of a run, a checkpoint or a Transformers folder in some format."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from terakoya.commands.component_settings import gather, take_flags
from terakoya.commands.guidance import next_command
from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.components import Exporter
    from terakoya.conversion.export import ExportResult


def command(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CHECKPOINT|FOLDER [--SETTING VALUE...]",
            help="RUN, one of RUN/checkpoints/step-..., or a Transformers folder, then settings of the format.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    format: Annotated[
        str, typer.Option(help="The exporter's name: huggingface, onnx, gguf, sentence_transformers, megatron, ...")
    ] = "huggingface",
    only: Annotated[
        str | None,
        typer.Option(help="Export only this one of several models, generator or discriminator, into OUT itself."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="PLUGIN", help="Export the weights that an event plugin keeps: ema, the moving average."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one of the format's settings.")
    ] = None,
) -> None:
    """Write the models of a run or checkpoint as folders that Transformers loads.

    Other formats have settings, such as --tp and --pp of megatron, or --pooling of sentence_transformers; `terakoya
    plugins show NAME` lists them.
    """
    from terakoya.conversion.elsewhere import elsewhere
    from terakoya.conversion.export import export
    from terakoya.plugins import registry

    exporter: type[Exporter] = registry().component("exporters", format)
    rest, flags = take_flags(arguments, exporter.model_fields, verb="export")
    if len(rest) != 1:
        raise UserError(f"expected one run, checkpoint or folder, got {' '.join(rest) or 'none'}")
    settings = gather({}, overrides or [], flags)
    with elsewhere() if exporter.for_transformers else nullcontext() as process:
        done = export(Path(rest[0]), out, format=format, only=only, weights=weights, settings=settings)
        _report(done)
        if process is not None:
            process.check(done.classes, trusted=done.trusted)
    if done.models:
        next_command.after_model(done.out)


def _report(done: ExportResult) -> None:
    """Says what was written, and how Transformers loads it."""
    from rich.text import Text

    from terakoya.components.tokenizer import mecab_arguments
    from terakoya.log import console

    step = "" if done.step is None else f" (step {done.step:,})"
    console().print(f"exported {done.checkpoint}{step} to {done.out}", soft_wrap=True)
    for sentence in done.compared:
        console().print(Text(f"  {sentence}"), soft_wrap=True)
    for folder, model in done.classes.items():
        trust = ", trust_remote_code=True" if folder in done.trusted else ""
        words = "".join(f", {key}={value}" for key, value in mecab_arguments(folder.resolve()).items())
        for line in (
            f"from transformers import AutoTokenizer, {model}",
            f'model = {model}.from_pretrained("{folder}"{trust})',
            f'tokenizer = AutoTokenizer.from_pretrained("{folder}"{trust}{words})',
        ):
            console().print(Text(f"  {line}"), soft_wrap=True)
        if words:
            console().print(
                f"{folder}: Transformers looks for MeCab's user dictionary in the working directory; with mecab_kwargs "
                "it finds it from anywhere",
                soft_wrap=True,
            )
    if not done.models and (readme := done.out / "README.md").is_file():
        console().print(f"how to use it: {readme}", soft_wrap=True)
