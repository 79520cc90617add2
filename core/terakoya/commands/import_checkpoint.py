"""`terakoya import`: converts another program's checkpoint to a Transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.component_settings import gather, take_flags
from terakoya.commands.guidance import next_command
from terakoya.errors import UserError


def command(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="FORMAT SOURCE [--SETTING VALUE...]",
            help="The format (see: plugins list), the checkpoint, then settings of the format.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the model's tokenizer; its files are copied to the new folder.", show_default=False
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one of the format's settings.")
    ] = None,
) -> None:
    """Convert another program's checkpoint to a folder that Transformers loads."""
    from rich.text import Text

    from terakoya.conversion.import_checkpoint import import_checkpoint
    from terakoya.log import console
    from terakoya.plugins import registry

    if len(arguments) < 2 or arguments[0].startswith("--"):
        names = ", ".join(registry().names("importers"))
        raise UserError(f"expected a format ({names}) and a checkpoint: terakoya import FORMAT SOURCE --out DIR")
    format, *remaining = arguments
    rest, flags = take_flags(remaining, registry().component("importers", format).model_fields, verb="import")
    if len(rest) != 1:
        raise UserError(f"expected one checkpoint after the format, got {' '.join(rest) or 'none'}")
    settings = gather({}, overrides or [], flags)
    done = import_checkpoint(Path(rest[0]), out, format=format, tokenizer=tokenizer, settings=settings)
    differs = done.tokenizer_size not in (None, done.vocabulary_size)
    pieces = f", of which the tokenizer has {done.tokenizer_size:,}" if differs else ""
    print_line = console().print
    print_line(
        f"{rest[0]}: {done.parameter_count:,} parameters, {done.vocabulary_size:,} pieces{pieces}", soft_wrap=True
    )
    for name, kind in done.models.items():
        print_line(Text(f"  from transformers import AutoTokenizer, {kind}"), soft_wrap=True)
        print_line(Text(f'  model = {kind}.from_pretrained("{done.out / name}")'), soft_wrap=True)
        if done.tokenizer_size is not None:
            print_line(Text(f'  tokenizer = AutoTokenizer.from_pretrained("{done.out / name}")'), soft_wrap=True)
    if done.tokenizer_size is not None:
        next_command.after_model(done.out)
    else:
        print_line("  without a tokenizer: --tokenizer DIR adds one", markup=False, soft_wrap=True)
        next_command.show("verify", done.out)
