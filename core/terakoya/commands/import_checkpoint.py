"""`terakoya import`: another program's checkpoint becomes a Transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.component_settings import gather, take_flags
from terakoya.errors import UserError


def command(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="FORMAT SOURCE [--SETTING VALUE...]",
            help="The format (see: plugins list), the checkpoint, and settings of the format.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="The folder of its tokenizer, which is copied in.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one of the format's settings.")
    ] = None,
) -> None:
    """Write another program's checkpoint as a folder that Transformers loads."""
    from terakoya.conversion.import_checkpoint import import_checkpoint
    from terakoya.log import console
    from terakoya.plugins import registry

    if len(arguments) < 2 or any(each.startswith("--") for each in arguments[:1]):
        names = ", ".join(registry().names("importers"))
        raise UserError(f"expected a format ({names}) and a checkpoint: terakoya import FORMAT SOURCE --out DIR")
    format, *waiting = arguments
    rest, flags = take_flags(waiting, registry().component("importers", format).model_fields)
    if len(rest) != 1:
        raise UserError(f"expected one checkpoint behind the format, got {' '.join(rest) or 'none'}")
    settings = gather({}, overrides or [], flags)
    done = import_checkpoint(Path(rest[0]), out, format=format, tokenizer=tokenizer, settings=settings)
    pieces = f", of which the tokenizer has {done.tokenizer:,}" if done.tokenizer not in (None, done.vocabulary) else ""
    print_line = console().print
    print_line(f"{rest[0]}: {done.parameters:,} parameters, {done.vocabulary:,} pieces{pieces}", soft_wrap=True)
    print_line(f"  from transformers import AutoTokenizer, {done.model}", markup=False, soft_wrap=True)
    print_line(f'  model = {done.model}.from_pretrained("{done.out}")', markup=False, soft_wrap=True)
    if done.tokenizer is not None:
        print_line(f'  tokenizer = AutoTokenizer.from_pretrained("{done.out}")', markup=False, soft_wrap=True)
    else:
        print_line("  without a tokenizer: --tokenizer DIR copies one in", markup=False, soft_wrap=True)
